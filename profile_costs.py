"""Step costs, measured at start-up in the mode that will run: what a draft costs, and what verifying T tokens costs.

python profile_costs.py [--model DIR] [--output-json FILE]
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm


@dataclass
class CostTable:
    """Measured points and, from them, flat arrays in milliseconds: monotone, interpolated, extrapolated at the end."""

    meta: dict  # device, dtype, model, mode, context_len
    draft_points: list[tuple[int, float]]  # (requests, ms), empty without a drafter
    verify_points: list[tuple[int, float]]  # (tokens, ms)

    def __post_init__(self):
        for points in filter(None, (self.draft_points, self.verify_points)):
            if min(ms for _, ms in points) <= 0 or (len(points) > 2 and len({ms for _, ms in points}) == 1):
                raise ValueError(f"cost table is flat or not positive: {points}")

    def verify_ms(self, max_tokens: int) -> np.ndarray:
        """verify_ms[T] for T = 0 .. max_tokens."""
        return interpolate(self.verify_points, max_tokens)

    def draft_ms(self, max_requests: int) -> np.ndarray:
        """draft_ms[R] for R = 0 .. max_requests; zero without a drafter."""
        return interpolate(self.draft_points, max_requests) if self.draft_points else np.zeros(max_requests + 1)

    def to_json(self) -> dict:
        return {
            "meta": self.meta,
            "draft_cost_ms": self.draft_points,
            "verify_cost_ms": self.verify_points,
            "padded": False,
        }


def interpolate(points: list[tuple[int, float]], last: int) -> np.ndarray:
    """Costs for 0 .. last from points (count, ms): never falling, linear in between, the overall slope past the end."""
    count, ms = np.array(points, dtype=float).T
    ms = np.minimum.accumulate(ms[::-1])[::-1]  # noise only ever adds time, so a later, lower point is the truer one
    costs = np.interp(np.arange(last + 1), count, ms)
    if last > count[-1] and len(count) > 1:
        slope = (ms[-1] - ms[0]) / (count[-1] - count[0])
        beyond = np.arange(int(count[-1]) + 1, last + 1)
        costs[beyond] = ms[-1] + slope * (beyond - count[-1])
    return costs


def grid(last: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and `last` itself."""
    powers = [2**i for i in range(last.bit_length())]
    return sorted({n for n in powers + [3 * p for p in powers] if n < last} | {last})


def measure(
    run_verify: Callable[[int], None], run_draft: Callable[[int], None] | None, max_tokens: int, max_requests: int, meta
) -> CostTable:
    """Median of five runs per shape, in ms. run_verify(tokens) and run_draft(requests) must wait for the device."""

    def median_ms(run: Callable[[int], None], count: int) -> float:
        run(count)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            run(count)
            times.append((time.perf_counter() - start) * 1e3)
        return round(statistics.median(times), 4)

    jobs = [(run_verify, n, "verify") for n in grid(max_tokens)]
    jobs += [(run_draft, n, "draft") for n in grid(max_requests)] if run_draft else []
    points = {"verify": [], "draft": []}
    for run, count, kind in tqdm(jobs, desc="profiling step costs", leave=False):
        points[kind].append((count, median_ms(run, count)))
    return CostTable(meta, points["draft"], points["verify"])


def main() -> None:
    import argparse
    import json

    from engine import DEFAULT_MODEL, Engine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--output-json")
    args = parser.parse_args()
    table = Engine(args.model).cost_table
    print(f"{'tokens':>8} {'verify ms':>10}     {'requests':>8} {'draft ms':>10}")
    for i, (tokens, ms) in enumerate(table.verify_points):
        draft = "{:8d} {:10.2f}".format(*table.draft_points[i]) if i < len(table.draft_points) else ""
        print(f"{tokens:8d} {ms:10.2f}     {draft}")
    if args.output_json:
        with open(args.output_json, "w") as file:
            json.dump(table.to_json(), file)


if __name__ == "__main__":
    main()
