"""Step costs, measured at start-up in the mode that will run: what a draft costs, and what verifying T tokens costs.

python profile_costs.py [--model DIR] [--compile] [--output-json FILE] [--plot FILE]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

ROUNDS, MAX_SECONDS = (5, 15), 8.0  # runs of every shape: at least, at most; begin no further round after so long


@dataclass
class CostTable:
    """Measured points and, from them, flat arrays in milliseconds.

    meta: what the times hold for: device, dtype, model, mode, context_len. padded: every step is padded up to the next
    measured size, so the cost is a staircase over the points; otherwise it is interpolated. Either way it never falls,
    and past the last point it goes on with the overall slope. Raises ValueError for a table that is empty, not
    positive or flat: with a flat one the best budget is always "verify everything", and nobody would notice.
    """

    meta: dict
    draft_points: list[tuple[int, float]]  # (requests, ms), rising counts; empty without a drafter
    verify_points: list[tuple[int, float]]  # (tokens, ms), rising counts
    padded: bool = False

    def __post_init__(self):
        if not self.verify_points:
            raise ValueError("cost table: no verify costs")
        for name, points in (("draft", self.draft_points), ("verify", self.verify_points)):
            counts, costs = [count for count, _ in points], [ms for _, ms in points]
            if points and not (0 < min(costs) and max(costs) < float("inf")):
                raise ValueError(f"cost table: {name} costs must be positive, got {points}")
            if counts != sorted(set(counts)) or (counts and counts[0] < 1):
                raise ValueError(f"cost table: {name} counts must rise from 1 or more, got {counts}")
        costs = [ms for _, ms in self.verify_points]
        if self.verify_points[-1][0] >= 16 and costs[-1] < 1.05 * min(costs):
            raise ValueError(f"cost table: verify costs are flat, {self.verify_points}")

    def verify_ms(self, max_tokens: int) -> np.ndarray:
        """verify_ms[T] for T = 0 .. max_tokens."""
        return flat_costs(self.verify_points, max_tokens, self.padded)

    def draft_ms(self, max_requests: int) -> np.ndarray:
        """draft_ms[R] for R = 0 .. max_requests; zero without a drafter."""
        return (
            flat_costs(self.draft_points, max_requests, self.padded)
            if self.draft_points
            else np.zeros(max_requests + 1)
        )

    def save(self, path: str | Path) -> None:
        table = {"meta": self.meta, "draft_cost_ms": self.draft_points, "verify_cost_ms": self.verify_points}
        Path(path).write_text(json.dumps(table | {"padded": self.padded}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path, meta: dict, padded: bool) -> "CostTable":
        """Read a saved table. Raises ValueError if it was measured for anything else than `meta`, naming what differs."""
        try:
            raw = json.loads(Path(path).read_text())
            points = [
                [(int(count), float(ms)) for count, ms in raw[key]] for key in ("draft_cost_ms", "verify_cost_ms")
            ]
            table = cls(dict(raw["meta"]), *points, bool(raw["padded"]))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"cost table {path}: {type(error).__name__}: {error}") from None
        for key, value in (meta | {"padded": padded}).items():
            other = table.padded if key == "padded" else table.meta.get(key)
            if other != value and key != "context_len":
                raise ValueError(f"cost table {path} was measured for {key} {other!r}, this engine has {value!r}")
        return table


def flat_costs(points: list[tuple[int, float]], last: int, padded: bool) -> np.ndarray:
    """Costs for counts 0 .. last from measured points (count, ms)."""
    count, ms = np.array(points, dtype=float).T
    ms = np.minimum.accumulate(ms[::-1])[::-1]  # noise only ever adds time, so a later, lower point is the truer one
    wanted = np.arange(last + 1)
    if padded:
        costs = ms[np.searchsorted(count, wanted).clip(max=len(count) - 1)]
    else:
        costs = np.interp(wanted, count, ms)
    slope = (ms[-1] - ms[0]) / (count[-1] - count[0]) if len(count) > 1 else 0.0
    return costs + slope * np.maximum(wanted - count[-1], 0)


def convex_below(costs: np.ndarray) -> np.ndarray:
    """The greatest convex curve that is nowhere above `costs` [N]: a walk along it is not stopped by a bump of noise."""
    corners = []
    for i, ms in enumerate(costs):
        while len(corners) > 1:
            (a, a_ms), (b, b_ms) = corners[-2:]
            if (b_ms - a_ms) * (i - b) < (ms - b_ms) * (b - a):  # slopes rise at b: it stays a corner
                break
            corners.pop()
        corners.append((i, ms))
    return np.interp(np.arange(len(costs)), *zip(*corners))


def doubling_grid(last: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and `last` itself: enough points to interpolate between."""
    powers = [2**i for i in range(last.bit_length())]
    return sorted({n for n in powers + [3 * p for p in powers] if n < last} | {last})


def padding_grid(last: int) -> list[int]:
    """Sizes that steps are padded up to: 1, 2, 4, 8, then steps of 8 to 256, then of 16, and `last` itself."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, last, 16)]
    return [n for n in sizes if n < last] + [last]


def measure(
    run_verify: Callable[[int], None],
    run_draft: Callable[[int], None] | None,
    token_counts: list[int],
    request_counts: list[int],
    meta: dict,
    padded: bool,
    quiet: bool = False,
) -> CostTable:
    """Median of ROUNDS runs per shape, in ms, of fewer if they take long; shows a progress bar unless `quiet`.
    run_verify(tokens) and run_draft(requests) must wait for the device.

    The shapes take turns, so that a machine that is slow for a moment does not make one of them look expensive. The
    quickest run of each would vary less, but where others share the cores it flatters large shapes, which suffer more.
    """
    jobs = [("verify", n, run_verify) for n in token_counts]
    jobs += [("draft", n, run_draft) for n in request_counts] if run_draft else []
    times = {(kind, count): [] for kind, count, _ in jobs}
    enough = time.perf_counter() + MAX_SECONDS
    with tqdm(total=(1 + ROUNDS[1]) * len(jobs), desc="profiling step costs", leave=False, disable=quiet) as bar:
        for turn in range(1 + ROUNDS[1]):
            for kind, count, run in jobs:
                start = time.perf_counter()
                run(count)
                times[kind, count].append((time.perf_counter() - start) * 1e3)
                bar.update()
            if turn >= ROUNDS[0] and of_first_process(time.perf_counter() > enough):
                break
    points = {"verify": [], "draft": []}  # without the first run, which may set things up
    for (kind, count), measured in times.items():
        points[kind].append((count, round(statistics.median(measured[1:]), 4)))
    return CostTable(meta, points["draft"], points["verify"], padded)


def of_first_process(value):
    """What `value` is in the first of several processes: they have to run the same steps, or would wait forever."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def plot(table: CostTable, path: str) -> None:
    """Measured points and the flat tables made from them, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axis, points, what in ((axes[0], table.verify_points, "tokens"), (axes[1], table.draft_points, "requests")):
        if points:
            costs = flat_costs(points, points[-1][0], table.padded)
            axis.plot(range(1, len(costs)), costs[1:], drawstyle="steps-post" if table.padded else "default")
            axis.plot(*zip(*points), "o", markersize=4)
        axis.set(xlabel=f"{what} per step", ylabel="ms", ylim=(0, None))
    axes[0].set_title("verify")
    axes[1].set_title("draft")
    figure.savefig(path, dpi=120)


def main() -> None:
    from engine import DEFAULT_MODEL, Engine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on CUDA only")
    parser.add_argument("--output-json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="needs matplotlib")
    args = parser.parse_args()
    try:
        table = Engine(args.model, device=args.device, compile=args.compile).cost_table
        print(f"{'tokens':>8} {'verify ms':>10}     {'requests':>8} {'draft ms':>10}")
        for i, (tokens, ms) in enumerate(table.verify_points):
            draft = "{:8d} {:10.2f}".format(*table.draft_points[i]) if i < len(table.draft_points) else ""
            print(f"{tokens:8d} {ms:10.2f}     {draft}")
        if args.output_json:
            table.save(args.output_json)
        if args.plot:
            plot(table, args.plot)
    except ModuleNotFoundError as error:
        sys.exit(f"profile_costs.py: --plot needs {error.name}: pip install {error.name}")
    except (ValueError, OSError) as error:
        print(f"profile_costs.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
