"""Speculative decoding of DeepSeek-V4 with the DSpark drafter and adaptive verification.

    python engine.py                                  # the embedded checkpoint, one prompt, text as it is written
    python engine.py --prompt "class Stack:" --temperature 0 --output-json -

Read `Engine.step`: it is the whole algorithm. State that changes every step (anchors, drafts, their distributions and
confidences) lives on the device, one row per sequence slot; the host reads back once per step and does the bookkeeping.
"""

import logging
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from drafter import Drafter
from model import Transformer
from profile_costs import CostTable, convex_below, doubling_grid, measure, of_first_process, padding_grid
from prompts import Prompt, encode_prompt, load_tokenizer
from replay import Replayed
from sampling import DRAFT, Warp, request_key, uniform
from verify import accept, accept_coupled, admit, best_budget, early_stop_budget, gains, layout, logprobs
from weights import bytes_by_kind, cache_buffers, fetch, free_memory, load_checkpoint, outline

log = logging.getLogger(__name__)

DEFAULT_MODEL = str(Path(__file__).parent / "checkpoints" / "tiny")
BUDGET_RULES = ("auto", "stale", "early-stop")
DRAFT_SAMPLE_METHODS = ("probabilistic", "greedy")
ACCEPTANCE_RULES = ("rejection", "coupled")
RECENT_BLOCKS = 64  # whose survivals stand for those of blocks to come
PROBE_INTERVALS = 64, 1024  # steps without drafts until a block is drafted to see whether it pays again: first, most
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    temperature 0 is greedy; top_k 0 keeps all tokens, top_p 1 all the mass. seed together with the request's index keys
    its randomness. stop: the text ends before the first of these strings, token_ids with the token that completes it.
    stop_token_ids: such a token ends the request and is part of neither. logprobs: how many of the best tokens' log-
    probabilities to return beside each emitted token's own; None: none at all.
    """

    temperature: float = 1.0
    max_tokens: int = 128
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self):
        if not 0 <= self.temperature <= 1e6:
            raise ValueError(f"temperature is {self.temperature}, allowed: 0 (greedy) to 1e6")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}, allowed: 0 to 2**63 - 1")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}, allowed: 1 or more")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k is {self.top_k}, allowed: 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, allowed: above 0, at most 1")
        if isinstance(self.stop, str) or "" in self.stop:
            raise ValueError(f"stop is {self.stop!r}, allowed: a list of texts that are not empty")
        if self.logprobs is not None and not 0 <= self.logprobs <= 100:
            raise ValueError(f"logprobs is {self.logprobs}, allowed: 0 to 100")


@dataclass
class Completion:
    """What one request came to.

    finish_reason: "stop" (a stop token or string), "length", "error" (error says which) or "cut" (cancelled, or
    generate was interrupted). logprobs, if asked for, has for every token {"token_id", "logprob", "top_logprobs":
    [{"token_id", "logprob"}, ...]}: the target's own, before temperature, top-k and top-p.
    """

    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[dict] | None = None
    error: str | None = None


class PromptTooLong(ValueError):
    """A prompt that leaves no room for a token under max_model_len; others can go on without it."""


class Request:
    """Host-side bookkeeping of one sequence."""

    def __init__(
        self, index: int, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams, max_len: int
    ):
        self.index, self.prompt, self.prompt_token_ids, self.params = index, prompt, prompt_token_ids, params
        self.output: list[int] = []
        self.max_tokens = min(params.max_tokens, max_len - len(prompt_token_ids))
        self.finish_reason: str | None = None
        self.text: str | None = None  # if a stop string has cut it
        self.error: str | None = None
        self.logprobs: list[dict] | None = None if params.logprobs is None else []
        self.slot = -1  # row in every cache and in the device state, while running
        self.prefilled = 0  # prompt tokens whose keys are stored; the last prompt token is the first anchor
        self.drafts: list[int] = []  # the block that the next step verifies, as read back
        self.confidence: list[float] = []  # of that block
        self.survival = np.zeros(0)  # of that block: the running product

    def limit(self, gamma: int) -> int:
        """How many drafts the next step may verify: a block must exist, and one more token than accepted is emitted."""
        return min(gamma, self.max_tokens - len(self.output) - 1) if self.drafts else 0


class PromptChunk(NamedTuple):
    """A piece of a prompt that is stored in this step, without asking for logits."""

    token_ids: list[int]
    slot: int
    first: int  # position of the first of them


@dataclass
class Stats:
    """Sums over the steps of one `generate` call."""

    steps: int = 0
    output_tokens: int = 0
    wall_s: float = 0.0
    request_steps: int = 0  # (request, step) pairs that emitted
    emitted: int = 0  # tokens emitted by them, those after a stop token included
    budget: int = 0
    reached: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [gamma] verified, all drafts before accepted
    accepted: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [gamma]
    time_s: dict[str, float] = field(default_factory=dict)
    cost_error: list[float] = field(default_factory=list)  # |predicted / measured - 1| per decode step

    def report(self) -> dict:
        return {
            "output_tokens": self.output_tokens,
            "wall_s": round(self.wall_s, 4),
            "tokens_per_s": round(self.output_tokens / max(self.wall_s, 1e-9), 2),
            "steps": self.steps,
            "mean_accepted_length": round(self.emitted / max(self.request_steps, 1), 4),
            "mean_budget_per_request": round(self.budget / max(self.request_steps, 1), 4),
            "acceptance_by_position": [round(a / r, 4) if r else None for a, r in zip(self.accepted, self.reached)],
            "time_s": {name: round(seconds, 4) for name, seconds in self.time_s.items()},
            "median_cost_error": round(float(np.median(self.cost_error)), 4) if self.cost_error else None,
        }


class Engine:
    """Runs many requests at once over one target and, unless num_speculative_tokens is 0, its drafter.

    model: a directory in the release format, or a hub id, of which revision is a branch, tag or commit. max_num_seqs:
    sequence slots. max_num_batched_tokens: tokens per step.
    budget_rule: "stale", "early-stop", or "auto": early-stop where costs are interpolated, stale where they are a
    staircase. draft_sample_method: "probabilistic" draws drafts as the requests are sampled, "greedy" takes the best.
    acceptance: "rejection", or "coupled": the text is that of plain sampling with the same seed, whatever is drafted or
    verified, at some cost in acceptance. cost_table: a table, or the path of a saved one, instead of measuring. compile:
    compile layers and drafts when the engine is made, which takes a minute, less when torch's own cache has them; the
    default is to do so on CUDA. padded: pad every step up to a grid of sizes and replay what was recorded for that size;
    the default is to do so where compiled for CUDA.
    Raises ValueError, naming the value and what is allowed, for anything that cannot work.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        num_speculative_tokens: int | None = None,
        adaptive_verification: bool = True,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        compile: bool | None = None,
        profile_context_len: int = 8192,
        budget_rule: str = "auto",
        draft_sample_method: str = "probabilistic",
        acceptance: str = "rejection",
        cost_table: str | CostTable | None = None,
        padded: bool | None = None,
        revision: str | None = None,
    ):
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}, allowed: {', '.join(DTYPES)}")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is cuda, but CUDA is not available here; allowed: cpu")
        if num_speculative_tokens is not None and not 0 <= num_speculative_tokens <= 64:
            raise ValueError(f"num_speculative_tokens is {num_speculative_tokens}, allowed: 0 to 64")
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs is {max_num_seqs}, allowed: 1 to max_num_batched_tokens ({max_num_batched_tokens})"
            )
        for name, value, allowed in (
            ("budget_rule", budget_rule, BUDGET_RULES),
            ("draft_sample_method", draft_sample_method, DRAFT_SAMPLE_METHODS),
            ("acceptance", acceptance, ACCEPTANCE_RULES),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}, allowed: {', '.join(allowed)}")
        if profile_context_len < 0:
            raise ValueError(f"profile_context_len is {profile_context_len}, allowed: 0 or more")
        directory = fetch(model, revision, weights=False)
        compile = device == "cuda" if compile is None else compile
        padded = device == "cuda" and compile if padded is None else padded
        group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        use_drafter = num_speculative_tokens != 0
        _, target, drafter = outline(directory, DTYPES[dtype], use_drafter, group, packed=device == "cuda")
        config = self.config = target.config
        if drafter is None and num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens is {num_speculative_tokens}, but {model} has no drafter: allowed: 0"
            )
        gamma = 0 if drafter is None else num_speculative_tokens or config.dspark_block_size
        max_model_len = config.max_position_embeddings if max_model_len is None else max_model_len
        if not gamma + 2 <= max_model_len <= config.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {max_model_len}, allowed: {gamma + 2} to {config.max_position_embeddings}"
            )
        self.adaptive = adaptive_verification and gamma > 0
        if self.adaptive and drafter.confidence_head is None:
            raise ValueError(f"adaptive_verification is on, but {model} has no confidence head: allowed: off")
        if drafter is None and num_speculative_tokens is None:
            log.info("%s has no drafter: no speculation", model)
        self.gamma, self.device, self.max_model_len = gamma, device, max_model_len
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_chunk = max(min(max_num_batched_tokens, 256), gamma + 1)  # most tokens of one sequence in a step
        caches = max_num_seqs, max_model_len, self.max_chunk
        allocate_caches(target, drafter, *caches)
        self.check_memory(target, drafter)
        directory = fetch(model, revision)
        self.tokenizer = load_tokenizer(directory)
        self.target, self.drafter = load_checkpoint(directory, DTYPES[dtype], device, use_drafter, group)
        allocate_caches(self.target, self.drafter, *caches)

        self.early_stop = budget_rule == "early-stop" or (budget_rule == "auto" and not padded)
        most_tokens = min(max_num_batched_tokens, max_num_seqs * (gamma + 1))
        make_grid = padding_grid if padded else doubling_grid
        self.token_grid = make_grid(max_num_batched_tokens if padded else most_tokens)
        self.request_grid = make_grid(max_num_seqs)
        self.padded, self.compiled = padded, compile
        self.greedy_drafts, self.coupled = draft_sample_method == "greedy", acceptance == "coupled"

        S = max_num_seqs + 1  # device state, one row per slot; the last one is scratch, for padding
        with torch.device(device):
            self.anchor = torch.zeros(S, dtype=torch.int64)  # newest token; the target has no keys for it yet
            self.position = torch.zeros(S, dtype=torch.int64)  # of the anchor
            self.temperature = torch.zeros(S)
            self.top_k = torch.zeros(S, dtype=torch.int64)
            self.top_p = torch.ones(S)
            self.key = torch.zeros(S, dtype=torch.int64)  # of the request's random numbers
            self.drafts = torch.zeros(S, gamma, dtype=torch.int64)
            self.q = torch.zeros(S, gamma, config.vocab_size)  # what each draft was drawn from
            self.confidence = torch.ones(S, gamma)
            self.stored = torch.zeros(S, dtype=torch.int64)  # the drafter has keys of the positions before this one
        self.requests: list[Request] = []  # of the latest generate call
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free_slots: list[int] = []
        self.step_index = 0
        self.stats = Stats()
        self.recent_survival = np.ones((RECENT_BLOCKS, gamma))  # a ring, of blocks that were verified
        self.num_blocks = 0  # that have gone into it
        self.undrafted_steps, self.probe_interval = 0, PROBE_INTERVALS[0]
        self.lazy = self.adaptive and not padded and gamma < config.sliding_window  # recorded steps store at once
        self.lag = 0  # positions that the drafter's keys may be behind by; the taps of these are kept
        self.pace = 1.0  # of the machine lately, against when costs were measured; it changes no decision
        self.keeping = False  # whether this step adds to it
        context_len = min(profile_context_len, max_model_len - gamma - 2)
        self.forward, self.draft = (Replayed(f) if padded else f for f in (self.forward, self.draft))
        if compile:
            self.compile()
        if padded:
            self.record()
        mode = "compiled" if self.compiled else "eager"
        meta = {"device": device, "dtype": dtype, "model": model, "mode": mode, "context_len": context_len}
        if isinstance(cost_table, str):
            cost_table = CostTable.load(cost_table, meta, padded)
        self.cost_table = of_first_process(cost_table or self.profile(meta))
        self.verify_ms = self.cost_table.verify_ms(max_num_batched_tokens)
        self.convex_verify_ms = convex_below(self.verify_ms)
        self.draft_ms = self.cost_table.draft_ms(max_num_seqs)

    # ---- the step ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> dict:
        """One step: every running request verifies its admitted drafts and drafts its next block.

        Returns the trace record of the step (see README), the emitted tokens of each request in it.
        """
        self.lap(None)
        decoding, prompt_chunks = self.schedule()
        limits = [r.limit(self.gamma) for r in decoding]
        num_fixed = len(decoding) + sum(len(chunk.token_ids) for chunk in prompt_chunks)  # tokens that are not drafts
        budget = self.choose_budget(decoding, limits, num_fixed)
        drafting = self.gamma > 0 and bool(decoding) and self.drafting_pays(len(decoding))
        slots = self.tensor([r.slot for r in decoding])
        self.lap("schedule")
        trims = any(r.params.top_k or r.params.top_p < 1 for r in decoding)
        num_best = max((-1 if r.params.logprobs is None else r.params.logprobs for r in decoding), default=-1)
        self.keeping = self.lazy and (self.lag > 0 or not drafting)
        verified = self.run_verify(slots, limits, budget, prompt_chunks, trims, num_best)
        self.lap("verify")
        if drafting:
            self.run_draft(slots, trims)
        self.lap("draft")
        readback = torch.cat([self.drafts[slots], self.confidence[slots], *verified], dim=1)
        readback = readback.to("cpu", non_blocking=True)  # the one device-to-host copy, as float32
        most = max(min(sum(limits), self.max_num_batched_tokens - num_fixed), 0)
        verify_ms = self.convex_verify_ms if self.early_stop else self.verify_ms
        cost_ms = self.draft_ms[len(decoding)] + verify_ms[num_fixed : num_fixed + most + 1]
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()
        record = self.finish_step(decoding, budget, num_fixed + budget, drafting, readback.tolist())
        record["cost_ms"] = cost_ms.round(3).tolist()  # what the budget was chosen by, for 0, 1, ... drafts verified
        self.lap("bookkeeping")
        return record

    def schedule(self) -> tuple[list[Request], list[PromptChunk]]:
        """First come, first served: the requests that emit a token this step, and pieces of prompts to store.

        A prompt's last token is not part of a chunk: it is the request's first anchor.
        """
        while self.waiting and self.free_slots and len(self.running) < self.concurrency:
            self.join(self.waiting.popleft())
        decoding = [r for r in self.running if r.prefilled == len(r.prompt_token_ids) - 1]
        room, chunks = self.max_num_batched_tokens - len(decoding), []
        for r in self.running:
            left = len(r.prompt_token_ids) - 1 - r.prefilled
            length = min(left, room, self.max_chunk)
            if length > 0:
                token_ids = r.prompt_token_ids[r.prefilled : r.prefilled + length]
                chunks.append(PromptChunk(token_ids, r.slot, r.prefilled))
                r.prefilled += length
                room -= length
                if length == left and room > 0 and length < self.max_chunk:  # its anchor fits into this step, too
                    decoding.append(r)
                    room -= 1
        return decoding, chunks

    def join(self, r: Request) -> None:
        """Give the request a slot. Caches need no clearing: nothing written before is visible at its positions."""
        r.slot = self.free_slots.pop()
        self.anchor[r.slot], self.position[r.slot] = r.prompt_token_ids[-1], len(r.prompt_token_ids) - 1
        self.temperature[r.slot], self.key[r.slot] = r.params.temperature, request_key(r.params.seed, r.index)
        self.stored[r.slot] = self.position[r.slot]
        self.top_k[r.slot], self.top_p[r.slot] = r.params.top_k or self.config.vocab_size, r.params.top_p
        self.running.append(r)

    def choose_budget(self, decoding: list[Request], limits: list[int], num_fixed: int) -> int:
        """How many draft slots to verify beside `num_fixed` tokens that are not drafts.

        The global search must not look at the drafts that await verification (see verify.py): recent blocks stand in.
        """
        R, most = len(decoding), min(sum(limits), self.max_num_batched_tokens - num_fixed)
        if not self.adaptive or most <= 0:
            return max(most, 0)
        totals = slice(num_fixed, num_fixed + most + 1)  # tokens in the step, for every budget
        if self.early_stop:
            survival = np.concatenate([r.survival[:limit] for r, limit in zip(decoding, limits)])
            return early_stop_budget(gains(survival), R, self.draft_ms[R] + self.convex_verify_ms[totals])
        return best_budget(self.recent_gains(R).mean(0), R, self.draft_ms[R] + self.verify_ms[totals])

    def recent_gains(self, num_requests: int) -> np.ndarray:
        """`gains` [groups, num_requests * gamma + 1] of groups of requests, made of recent blocks. New engines know of
        no block yet and expect every draft to be accepted."""
        groups, blocks = max(1, RECENT_BLOCKS // num_requests), self.recent_survival
        if num_requests > RECENT_BLOCKS:
            blocks = np.resize(blocks, (num_requests, self.gamma))
        return gains(blocks[: groups * num_requests].reshape(groups, -1))

    def drafting_pays(self, num_requests: int) -> bool:
        """Whether to draft the next block at all, judged by recent blocks.

        The budget takes the draft as paid for; here its cost counts. While even the best budget earns less per
        millisecond than plain decoding nothing is drafted, but for a probe now and then, ever more rarely.
        """
        if not self.adaptive:
            return True
        R = num_requests
        most = min(R * self.gamma, self.max_num_batched_tokens - R)
        cost_ms = self.draft_ms[R] + self.verify_ms[R : R + most + 1]
        tokens = R + self.recent_gains(R)[:, : most + 1]
        best = (tokens / cost_ms).argmax(1)  # every group its own
        pays = tokens[np.arange(len(best)), best].sum() / cost_ms[best].sum() > R / self.verify_ms[R]
        self.undrafted_steps += 1
        if pays:
            self.probe_interval = PROBE_INTERVALS[0]
        elif self.undrafted_steps <= self.probe_interval:
            return False
        else:
            self.probe_interval = min(2 * self.probe_interval, PROBE_INTERVALS[1])
        self.undrafted_steps = 0
        return True

    def warp(self, slots: Tensor, trims: bool) -> Warp:
        """How the requests in `slots` [R] are sampled; trims: some of them with top-k or top-p."""
        trimming = (self.top_k[slots], self.top_p[slots]) if trims else ()
        return Warp(self.temperature[slots], *trimming)

    def run_verify(
        self,
        slots: Tensor,
        limits: Sequence[int],
        budget: int,
        prompt_chunks: Sequence[PromptChunk] = (),
        trims: bool = False,
        num_best: int = -1,
    ) -> list[Tensor]:
        """Verify `budget` drafts of the requests in `slots` [R] and store prompt chunks, in one forward of the target.

        limits: of every request, how many drafts may be verified. Moves the anchors on. Returns accepted [R, 1], admitted [R, 1], broken
        [R, 1] (logits that are not finite) and emitted [R, gamma + 1], of which accepted + 1 count; with num_best >= 0
        also their log-probabilities, flat.
        """
        most = max(limits, default=0)  # with no drafts at all, nothing of their size is touched
        anchor, position = self.anchor[slots], self.position[slots]
        drafts, q = self.drafts[slots, :most], self.q[slots, :most]
        admitted = admit(self.confidence[slots, :most].cumprod(1), self.tensor(limits), budget)
        spans = layout(anchor, drafts, admitted, budget)
        token, seq_slot, place = [], [], []
        for token_ids, slot, first in prompt_chunks:
            token.append(self.tensor(token_ids))
            seq_slot.append(torch.full_like(token[-1], slot))
            place.append(torch.arange(first, first + len(token_ids), device=self.device))
        token = torch.cat([*token, spans.token])
        seq_slot = torch.cat([*seq_slot, slots[spans.row]])
        place = torch.cat([*place, position[spans.row] + spans.offset])
        rows = torch.arange(len(token) - len(spans.token), len(token), device=self.device)
        if pad := self.padding(len(token), self.token_grid):
            token, place = F.pad(token, (0, pad)), F.pad(place, (0, pad))
            seq_slot = F.pad(seq_slot, (0, pad), value=self.max_num_seqs)
        if self.padded:
            rows = F.pad(rows, (0, len(token) - len(rows)))
        self.lag += (most + 1) * self.keeping
        logits = self.forward(token, seq_slot, place, rows)[: len(spans.token)]
        how = admitted, self.warp(slots, trims), self.key[slots], position
        result = accept_coupled(logits, spans, drafts, *how) if self.coupled else accept(logits, spans, drafts, q, *how)
        self.anchor[slots] = result.emitted.gather(1, result.accepted[:, None])[:, 0]
        self.position[slots] = position + result.accepted + 1
        broken = torch.zeros_like(slots).index_add_(0, spans.row, (~logits.isfinite().all(1)).long())
        emitted = F.pad(result.emitted, (0, self.gamma - most))
        verified = [result.accepted[:, None], admitted[:, None], broken[:, None], emitted]
        if num_best >= 0:
            verified.append(logprobs(logits, spans, emitted, num_best).flatten(1))
        return verified

    def forward(self, token: Tensor, seq_slot: Tensor, position: Tensor, rows: Tensor) -> Tensor:
        """The target's logits [len(rows), V] for tokens [T]; target and drafter store what later steps will look at.

        While nothing is drafted the drafter's keys would be wasted on most tokens: taps are kept until a draft needs them.
        """
        logits, taps = self.target(token, seq_slot, position, rows)
        if self.keeping:  # but for the prompt chunks, which are in front
            split = [len(token) - len(rows), len(rows)]
            (taps, kept), (seq_slot, slot), (position, place) = (x.split(split) for x in (taps, seq_slot, position))
            self.drafter.keep(kept, slot, place)
        if self.drafter and len(taps):
            self.drafter.store(taps, seq_slot, position)
        return logits

    def run_draft(self, slots: Tensor, trims: bool = False) -> None:
        """Draft the next block of the requests in `slots` [R], from their anchors."""
        if self.lag:
            self.drafter.catch_up(slots, self.stored[slots], self.position[slots], self.lag)
            self.lag = 0
        self.stored[slots] = self.position[slots]
        if pad := self.padding(len(slots), self.request_grid):
            slots = F.pad(slots, (0, pad), value=self.max_num_seqs)
        anchor, position, key = self.anchor[slots], self.position[slots], self.key[slots]
        warp = Warp(torch.zeros(len(slots), device=self.device)) if self.greedy_drafts else self.warp(slots, trims)
        block = self.draft(anchor, slots, position, key, *(t for t in warp if t is not None))
        self.drafts[slots], self.q[slots], self.confidence[slots] = block

    def draft(self, anchor: Tensor, slots: Tensor, position: Tensor, key: Tensor, *warp: Tensor) -> tuple[Tensor, ...]:
        """Drafts, their distributions and confidences for R requests; see Drafter.draft. warp: the fields of a Warp."""
        noise = uniform(key, position, DRAFT, self.gamma)
        return self.drafter.draft(anchor, slots, position, Warp(*warp), noise, key if self.coupled else None)

    def padding(self, count: int, grid: list[int]) -> int:
        """How many scratch rows to add to `count`: up to the grid if there is one, up to 2 if graphs are compiled."""
        if self.padded:
            return next(size for size in grid if size >= count) - count
        return 2 - count if self.compiled and count < 2 else 0

    def finish_step(
        self, decoding: list[Request], budget: int, num_tokens: int, drafted: bool, readback: list[list[float]]
    ) -> dict:
        """Bookkeeping on the host: outputs, stops, statistics, freed slots. Returns the trace record."""
        gamma, stats, records = self.gamma, self.stats, []
        blocks = np.array([row[gamma : 2 * gamma] for row in readback]).cumprod(-1) if drafted else None
        for i, (r, row) in enumerate(zip(decoding, readback)):
            drafts, confidence, rest = row[:gamma], row[gamma : 2 * gamma], row[2 * gamma :]
            accepted, admitted, broken = map(int, rest[:3])
            tokens = [int(t) for t in rest[3:][: accepted + 1]]
            if broken:
                accepted, tokens = 0, []
            stats.emitted += len(tokens)
            stats.reached[: min(accepted + 1, admitted)] += 1
            stats.accepted[:accepted] += 1
            record = {
                "index": r.index,
                "position": len(r.prompt_token_ids) + len(r.output) - 1,
                "anchor": r.output[-1] if r.output else r.prompt_token_ids[-1],
                "drafts": r.drafts,
                "confidence": r.confidence,
                "survival": r.survival.tolist(),
                "admitted": admitted,
                "accepted": accepted,
            }
            record["emitted"] = self.append(r, tokens)
            if r.logprobs is not None:
                r.logprobs += self.read_logprobs(rest[gamma + 4 :], record["emitted"], r.params.logprobs)
            if broken:
                r.finish_reason, r.error = "error", f"step {self.step_index}: the target's logits are not finite"
                self.clear_slot(r.slot)
            records.append(record)
            if r.drafts:
                self.recent_survival[self.num_blocks % RECENT_BLOCKS] = r.survival
                self.num_blocks += 1
            r.drafts, r.confidence, r.survival = [], [], np.zeros(0)
            if drafted:
                r.drafts, r.confidence, r.survival = [int(t) for t in drafts], confidence, blocks[i]
            if r.finish_reason:
                self.running.remove(r)
                self.free_slots.append(r.slot)
        predicted_ms = float(self.verify_ms[num_tokens] + (self.draft_ms[len(decoding)] if drafted else 0.0))
        predicted_ms *= self.pace
        measured_ms = (time.perf_counter() - self.step_start) * 1e3
        stats.cost_error.append(abs(predicted_ms / measured_ms - 1))
        self.pace *= (measured_ms / predicted_ms) ** 0.1
        stats.steps += 1
        stats.request_steps += len(decoding)
        stats.budget += budget
        self.step_index += 1
        return {
            "step": self.step_index - 1,
            "num_tokens": num_tokens,
            "budget": budget,
            "predicted_ms": round(predicted_ms, 3),
            "measured_ms": round(measured_ms, 3),
            "requests": records,
        }

    def clear_slot(self, slot: int) -> None:
        """Zero the slot's caches. What is masked counts with weight 0, but 0 times NaN would be NaN for the next user."""
        for module in filter(None, (self.target, self.drafter)):
            for cache in cache_buffers(module):
                cache[slot] = 0

    def append(self, r: Request, tokens: list[int]) -> list[int]:
        """Add tokens to the request's output up to a stop or max_tokens; returns those that were added."""
        stops = set(r.params.stop_token_ids) | (set() if r.params.ignore_eos else {self.config.eos_token_id})
        for i, token in enumerate(tokens):
            if token in stops:
                r.finish_reason = "stop"
                return tokens[:i]
            r.output.append(token)
            self.stats.output_tokens += 1
            if self.stop_string_ends(r):
                r.finish_reason = "stop"
                text = self.decode(r.output)
                r.text = text[: min(at for at in map(text.find, r.params.stop) if at >= 0)]
            elif len(r.output) == r.max_tokens:
                r.finish_reason = "length"
            if r.finish_reason:
                return tokens[: i + 1]
        return tokens

    def stop_string_ends(self, r: Request) -> bool:
        """Whether the newest token completes a stop string. A token has at least one byte, a character at most four."""
        if not r.params.stop:
            return False
        tail = self.decode(r.output[-4 * max(map(len, r.params.stop)) - 4 :])
        return any(stop in tail for stop in r.params.stop)

    def read_logprobs(self, row: list[float], tokens: list[int], num_best: int) -> list[dict]:
        """What Completion.logprobs says of the emitted tokens, from a row of `verify.logprobs`, flat."""
        width = len(row) // (self.gamma + 1)  # 1 + twice the largest number of best tokens that a request asked for
        found = []
        for i, token in enumerate(tokens):
            own, *rest = row[i * width : (i + 1) * width]
            best, ids = rest[: width // 2], rest[width // 2 :]
            top = [{"token_id": int(t), "logprob": lp} for t, lp in zip(ids[:num_best], best)]
            found.append({"token_id": token, "logprob": own, "top_logprobs": top})
        return found

    # ---- around the step -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        on_step: Callable[[dict], None] | None = None,
        concurrency: int | None = None,
        thinking: bool = False,
        indices: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Complete all prompts and return their completions in order.

        prompts: texts, lists of token ids, or lists of messages {"role", "content"}, which the assistant answers, after
        reasoning if `thinking`. on_step is called after every step with its trace record; concurrency limits the
        requests that run at once, below max_num_seqs; indices number the requests, which with the seed keys their
        randomness (default: 0, 1, ...). Raises ValueError for a prompt that is empty, too long for max_model_len or has
        a token id outside the vocabulary. After an exception from on_step, or KeyboardInterrupt, `completions` has what
        there is.
        """
        self.start(prompts, params, concurrency, thinking, indices)
        start = time.perf_counter()
        try:
            while self.busy:
                record = self.step()
                if on_step:
                    on_step(record)
        finally:
            self.stats.wall_s = time.perf_counter() - start
        return self.completions()

    def start(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        concurrency: int | None = None,
        thinking: bool = False,
        indices: Sequence[int] | None = None,
    ) -> None:
        """Queue requests for `step`, in place of whatever an interrupted call has left. Arguments as for `generate`."""
        all_params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        numbered = zip(range(len(prompts)) if indices is None else indices, prompts, all_params, strict=True)
        self.requests = [self.make_request(i, prompt, p, thinking) for i, prompt, p in numbered]
        self.stats = Stats(reached=np.zeros(self.gamma), accepted=np.zeros(self.gamma))
        self.concurrency = concurrency or self.max_num_seqs
        self.waiting, self.running = deque(self.requests), []
        self.free_slots = list(range(self.max_num_seqs))[::-1]

    def cancel(self, index: int) -> None:
        """Stop request `index` of the generate call that is under way (from on_step); it keeps what it has, "cut"."""
        for r in self.requests:
            if r.index == index and r.finish_reason is None:
                r.finish_reason = "cut"
                if r in self.running:
                    self.running.remove(r)
                    self.free_slots.append(r.slot)
                else:
                    self.waiting.remove(r)

    @property
    def busy(self) -> bool:
        """Whether there is anything left for `step` to do."""
        return bool(self.waiting or self.running)

    def completions(self) -> list[Completion]:
        """What the requests of the latest generate call have come to so far."""
        return [
            Completion(
                index=r.index,
                prompt=r.prompt,
                prompt_token_ids=r.prompt_token_ids,
                text=self.decode(r.output) if r.text is None else r.text,
                token_ids=r.output,
                finish_reason=r.finish_reason or "cut",
                logprobs=r.logprobs,
                error=r.error,
            )
            for r in self.requests
        ]

    def make_request(self, index: int, prompt: Prompt, params: SamplingParams, thinking: bool = False) -> Request:
        text, ids = encode_prompt(self.tokenizer, self.config.bos_token_id, prompt, thinking)
        if not ids:
            raise ValueError(f"prompt {index} has no tokens, allowed: at least one")
        for token in ids:
            if not (isinstance(token, int) and 0 <= token < self.config.vocab_size):
                raise ValueError(f"prompt {index} has token id {token}, allowed: 0 to {self.config.vocab_size - 1}")
        if params.logprobs is not None and params.logprobs > self.config.vocab_size:
            raise ValueError(f"logprobs is {params.logprobs}, allowed: 0 to the vocabulary's {self.config.vocab_size}")
        if len(ids) >= self.max_model_len:
            raise PromptTooLong(
                f"prompt {index} has {len(ids)} tokens, allowed: fewer than max_model_len {self.max_model_len}"
            )
        return Request(index, text, ids, params, self.max_model_len)

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids)

    @torch.inference_mode()
    def compile(self) -> None:
        """Compile the target's layers and the drafter now, on 29 rows of scratch, so that no step has to wait for it.

        The compiler takes sizes that are equal once for equal always, so the 29 should not be a width of the model.
        """
        compiler = os.environ.get("CXX", "g++")  # as torch chooses it
        if self.device == "cpu" and not shutil.which(compiler):
            print(f"--compile: no C++ compiler {compiler!r} here (set CXX); going on without", file=sys.stderr)
            self.compiled = False
            return
        print("compiling, a minute or two; less when torch finds it in its cache", file=sys.stderr, flush=True)
        row = torch.arange(29, device=self.device)
        slot, position = torch.full_like(row, self.max_num_seqs), row % self.max_model_len
        self.target.compile_layers()
        self.target(row % 2, slot, position, row)
        if self.drafter:
            self.drafter.compile_draft()
            noise = torch.rand(len(row), self.gamma, dtype=torch.float64, device=self.device)
            self.drafter.draft(row % 2, slot, position, self.warp(slot, False), noise, slot if self.coupled else None)

    @torch.inference_mode()
    def record(self) -> None:
        """Record every size of both grids now, on scratch rows, so that no step has to wait for it."""
        sizes = [(n, self.record_forward) for n in self.token_grid]
        sizes += [(n, self.run_draft) for n in self.request_grid if self.gamma]
        for n, call in tqdm(sizes, desc="recording steps of every size", leave=False, disable=self.config.rank > 0):
            call(torch.full((n,), self.max_num_seqs, device=self.device))
        if self.device == "cuda" and len(self.forward.recorded) < len(self.token_grid):
            raise RuntimeError("not every step size was recorded as a CUDA graph")

    def record_forward(self, slots: Tensor) -> None:
        zeros = torch.zeros_like(slots)
        self.forward(zeros, slots, zeros, zeros)

    @torch.inference_mode()
    def profile(self, meta: dict) -> CostTable:
        """Measure verification and drafting on random tokens behind meta["context_len"] positions of stale cache.

        Tokens must differ, or all would go to the same experts, which costs less.
        """
        context_len = meta["context_len"]
        numbers = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.config.vocab_size, (self.max_num_seqs, 1 + self.gamma), generator=numbers)
        tokens = tokens.to(self.device)
        self.keeping = self.lazy

        def place(num_requests: int) -> Tensor:
            slots = torch.arange(num_requests, device=self.device)
            self.position[slots] = context_len - slots % min(context_len + 1, 128)  # so that some close their windows
            self.anchor[slots], self.drafts[slots] = tokens[:num_requests, 0], tokens[:num_requests, 1:]
            return slots

        def run_verify(num_tokens: int) -> None:
            num_requests = min(self.max_num_seqs, num_tokens if self.gamma == 0 else (num_tokens + 1) // 2)
            slots = place(num_requests)
            self.run_verify(slots, [self.gamma] * num_requests, num_tokens - num_requests)[0].sum().item()

        def run_draft(num_requests: int) -> None:
            self.lag = 2 * self.lazy  # keys of the anchor and of a draft: only who drafts pays for them
            self.run_draft(place(num_requests))
            self.drafts.sum().item()

        most_tokens = min(self.max_num_batched_tokens, self.max_num_seqs * (self.gamma + 1))
        token_counts = [n for n in self.token_grid if n <= most_tokens]
        run_draft = run_draft if self.drafter else None
        quiet = self.config.rank > 0
        table = measure(run_verify, run_draft, token_counts, self.request_grid, meta, self.padded, quiet)
        self.lag = 0
        return table

    def check_memory(self, target: Transformer, drafter: Drafter | None) -> None:
        """Say what the outlined modules will need here. Raises ValueError if that is more than there is."""
        sizes = bytes_by_kind(target, drafter)
        self.cache_bytes_per_request = sizes["cache per request"]
        slots = self.max_num_seqs + 1
        sizes["drafts per request"] = 4 * self.gamma * self.config.vocab_size
        needed = sum(size * (slots if "per request" in kind else 1) for kind, size in sizes.items())
        free = free_memory(self.device)
        said = ", ".join(f"{size / 1e6:.1f} MB {kind}" for kind, size in sizes.items())
        there = "unknown" if free is None else f"{free / 1e9:.1f} GB"
        log.info("memory: %s (%d requests at once): %.2f GB of %s", said, self.max_num_seqs, needed / 1e9, there)
        if free is not None and needed > free:
            raise ValueError(
                f"this needs {needed / 1e9:.1f} GB ({said}, {slots - 1} requests at once), and {self.device} has {there} "
                f"free; {math.ceil(needed / max(free, 1))} devices of that size would hold it"
            )

    def lap(self, name: str | None) -> None:
        """Charge the time since the last call to `name`; None starts a step."""
        now = time.perf_counter()
        if name is None:
            self.step_start = now
        else:
            self.stats.time_s[name] = self.stats.time_s.get(name, 0.0) + now - self.last_lap
        self.last_lap = now

    def tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def allocate_caches(target: Transformer, drafter: Drafter | None, *sizes: int) -> None:
    """Of both; sizes as for Transformer.allocate_cache."""
    for module in filter(None, (target, drafter)):
        module.allocate_cache(*sizes)


if __name__ == "__main__":
    from cli import main

    sys.exit(main())
