"""Quantised weights that stay as they are stored, and are decoded where they are used.

FP8 (e4m3) linears are decoded inside the compiled graph, just before their product. Routed experts are FP4 (e2m1): a
decoded copy would be four times as large and most of it unused, so one kernel, written in Triton for CUDA, decodes the
chosen experts' weights in registers. Its plain PyTorch twin runs everywhere else. Source of the formats: the
DeepSeek-V4-Flash-DSpark release.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Experts, swiglu

try:
    import triton
    import triton.language as tl
except ImportError:  # it comes with CUDA builds of torch only
    triton = None

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # FP4 magnitudes; the fourth bit is the sign
FP8_BLOCK, FP4_BLOCK = (128, 128), (1, 32)  # rows and columns that share a scale; the last ones may be partial


def decode(stored: Tensor, scale: Tensor) -> Tensor:
    """A quantised matrix in float32, exactly: FP8 [N, K], or FP4 [N, K / 2] as int8, the low four bits first.

    scale: powers of two (e8m0), one for every block.
    """
    if stored.dtype == torch.int8:
        code = stored.view(torch.uint8)
        table = torch.tensor(E2M1 + [-value for value in E2M1], device=stored.device)
        values, block = table[torch.stack([code & 15, code >> 4], dim=-1).flatten(1).int()], FP4_BLOCK
    else:
        values, block = stored.float(), FP8_BLOCK
    rows, columns = values.shape
    scale = scale.float().repeat_interleave(block[0], 0)[:rows]
    return values * scale.repeat_interleave(block[1], 1)[:, :columns]


class PackedLinear(nn.Module):
    """A linear without bias whose weight is FP8; `weight` decodes it."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        blocks = [-(-size // block) for size, block in zip((out_features, in_features), FP8_BLOCK)]
        self.packed = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn), False)
        self.scale = nn.Parameter(torch.empty(blocks, dtype=torch.float8_e8m0fnu), False)

    @property
    def weight(self) -> Tensor:
        return decode(self.packed, self.scale).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class PackedExperts(Experts):
    """Routed experts in FP4."""

    def __init__(self, experts: Experts):
        nn.Module.__init__(self)
        self.limit, self.first, self.split = experts.limit, experts.first, experts.split
        for name, tensor in (("w13", experts.w13), ("w2", experts.w2)):
            E, rows, columns = tensor.shape
            packed = torch.empty(E, rows, columns // 2, dtype=torch.int8, device=tensor.device)
            scale = torch.empty(E, rows, -(-columns // 32), dtype=torch.float8_e8m0fnu, device=tensor.device)
            setattr(self, name, nn.Parameter(packed, False))
            setattr(self, f"{name}_scale", nn.Parameter(scale, False))

    def compute(self, x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        k = expert.shape[1]
        order, ends = self.sort(expert)
        gate, up = grouped_fp4(x[order // k], self.w13, self.w13_scale, ends).chunk(2, dim=-1)
        hidden = swiglu(gate, up, self.limit) * weight.flatten()[order, None].to(x.dtype)
        out = grouped_fp4(hidden, self.w2, self.w2_scale, ends)
        return torch.empty_like(out).index_copy(0, order, out).view(-1, k, out.shape[1]).sum(1)


def pack(module: nn.Module, dtype: torch.dtype, fp8: set[str], fp4: set[str]) -> None:
    """Replace the linears and experts of these names (as in named_modules) by packed ones, not yet filled."""
    for name in fp8 | fp4:
        parent, _, child = name.rpartition(".")
        parent = module.get_submodule(parent)
        old = getattr(parent, child)
        with torch.device("meta"):
            new = PackedExperts(old) if name in fp4 else PackedLinear(old.in_features, old.out_features, dtype)
        setattr(parent, child, new)


# ---- products with FP4 matrices, grouped by expert -------------------------------------------------------------------


def grouped_fp4(x: Tensor, packed: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """Rows ends[e - 1] .. ends[e] of x [N, K] times the transposed matrix e of packed [E, M, K / 2], [N, M] in x's type.

    Rows behind the last end come out as zeros. scale [E, M, K / 32]; ends [E] int32, rising.
    """
    return (grouped_fp4_triton if x.is_cuda else grouped_fp4_plain)(x, packed, scale, ends)


def grouped_fp4_plain(x: Tensor, packed: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    out, start = x.new_zeros(len(x), packed.shape[1]), 0
    for e, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = x[start:end] @ decode(packed[e], scale[e]).to(x.dtype).T
        start = end
    return out


ROWS, COLUMNS, DEPTH = 16, 64, 64  # of the tile that one program of the kernel computes


def grouped_fp4_triton(x: Tensor, packed: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """The kernel's launch. Every program takes ROWS rows of one expert; how many tiles there are is known on the device
    only, so as many are launched as there can be, and those with nothing to do return at once."""
    (N, K), (E, M, _) = x.shape, packed.shape
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    tile_ends = ((ends - starts + ROWS - 1) // ROWS).cumsum(0)
    tile = torch.arange(-(-N // ROWS) + E, device=x.device)
    expert = torch.searchsorted(tile_ends, tile, right=True).int()  # E: no tile
    mine = expert.clamp(max=E - 1)
    first_tile = torch.cat([tile_ends.new_zeros(1), tile_ends[:-1]])[mine]
    first_row = (starts[mine] + (tile - first_tile) * ROWS).int()
    out = x.new_zeros(N, M)
    grid = (len(tile), -(-M // COLUMNS))
    grouped_fp4_kernel[grid](
        x, packed.view(torch.uint8), scale.view(torch.uint8), ends, expert, first_row, out, E, M, K,
        ROWS, COLUMNS, DEPTH, x.dtype == torch.float32,
    )  # fmt: skip
    return out


if triton:

    @triton.jit
    def fp4_value(nibble):
        exponent, half = (nibble >> 1) & 3, (nibble & 1).to(tl.float32) * 0.5
        magnitude = tl.where(exponent == 0, half, (1.0 + half) * tl.exp2(exponent.to(tl.float32) - 1.0))
        return tl.where(nibble >= 8, -magnitude, magnitude)

    @triton.jit
    def grouped_fp4_kernel(
        x, packed, scale, ends, expert, first_row, out, E, M, K,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """out[rows of one expert, COLUMNS outputs] = x @ W^T; a byte holds channels 2i and 2i + 1 of one output."""
        e = tl.load(expert + tl.program_id(0))
        if e >= E:
            return
        row = tl.load(first_row + tl.program_id(0)) + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        row_in, column_in = row < tl.load(ends + e), column < M
        matrix_row = e.to(tl.int64) * M + column
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, K // 2, DEPTH):
            byte = start + tl.arange(0, DEPTH)
            byte_in = byte < K // 2
            inside = column_in[None, :] & byte_in[:, None]
            code = tl.load(packed + matrix_row[None, :] * (K // 2) + byte[:, None], mask=inside, other=0)
            exponent = tl.load(scale + matrix_row[None, :] * (K // 32) + byte[:, None] // 16, mask=inside, other=127)
            factor = tl.exp2(exponent.to(tl.float32) - 127.0)  # [DEPTH, COLUMNS]
            x_in = row_in[:, None] & byte_in[None, :]
            even = tl.load(x + row[:, None].to(tl.int64) * K + 2 * byte[None, :], mask=x_in, other=0.0)
            odd = tl.load(x + row[:, None].to(tl.int64) * K + 2 * byte[None, :] + 1, mask=x_in, other=0.0)
            low, high = fp4_value(code & 15) * factor, fp4_value(code >> 4) * factor
            if EXACT:
                total += tl.dot(even, low, input_precision="ieee") + tl.dot(odd, high, input_precision="ieee")
            else:
                total += tl.dot(even, low.to(even.dtype)) + tl.dot(odd, high.to(odd.dtype))
        where = out + row[:, None].to(tl.int64) * M + column[None, :]
        tl.store(where, total.to(out.dtype.element_ty), mask=row_in[:, None] & column_in[None, :])
