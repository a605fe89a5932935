"""Throughput over concurrency: adaptive verification against every fixed draft length and no speculation.

    python bench.py                                       # 1, 4, 16 and 64 requests at once, temperature 1
    python bench.py --concurrency 4 16 --policies adaptive --prompts code prose     # where does the budget go?
    python bench.py --concurrency 1 32 --policies adaptive transformers --temperature 0

Policies take turns inside one process on the same prompts, a quarter of a second at a time, because machines drift; the
median of several rounds counts, other prompts in each, because some texts are luckier than others.
"""

import argparse
import json
import re
import statistics
import sys
import time

import numpy as np
import torch
from tqdm import tqdm

from engine import DEFAULT_MODEL, Engine, SamplingParams
from model import Config
from train import held_out_prompts

PROMPT_LENGTH = 48
SLICE = 0.25  # seconds that a policy runs before it is the next one's turn
POLICIES = "adaptive, adaptive-stale, adaptive-early-stop, none, fixed-K, coupled-K, transformers"
POLICY = re.compile(r"adaptive(-stale|-early-stop)?|none|(fixed|coupled)-[1-9]\d*|transformers")


class Transformers:
    """Hugging Face transformers' own greedy generate, `concurrency` prompts of one length at a time."""

    def __init__(self, model: str):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def start(self, prompts: list[list[int]], params: SamplingParams, concurrency: int) -> None:
        self.batches = [prompts[i : i + concurrency] for i in range(0, len(prompts), concurrency)]
        self.num_tokens, self.max_tokens, self.seconds = len(prompts) * params.max_tokens, params.max_tokens, 0.0

    @property
    def busy(self) -> bool:
        return bool(self.batches)

    @torch.inference_mode()
    def step(self) -> None:
        tokens = torch.tensor(self.batches.pop())
        length = {"max_new_tokens": self.max_tokens, "min_new_tokens": self.max_tokens}
        self.model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **length)

    def report(self) -> dict:
        rate = self.num_tokens / self.seconds
        return {"tokens_per_s": rate, "mean_accepted_length": 1.0, "mean_budget_per_request": 0.0}


class Policy:
    """One way to run the engine: adaptive, adaptive-stale, adaptive-early-stop, none, fixed-K, or coupled-K."""

    def __init__(self, policy: str, options: dict):
        kind, _, argument = policy.partition("-")
        if kind == "adaptive":
            self.engine = Engine(**options, budget_rule=argument or "auto")
        elif policy == "none":
            self.engine = Engine(**options, num_speculative_tokens=0)
        else:
            options = options | {"num_speculative_tokens": int(argument), "adaptive_verification": False}
            self.engine = Engine(**options, acceptance="coupled" if kind == "coupled" else "rejection")

    def start(self, prompts: list[list[int]], params: SamplingParams, concurrency: int) -> None:
        self.engine.start(prompts, params, concurrency)
        self.seconds = 0.0

    @property
    def busy(self) -> bool:
        return self.engine.busy

    def step(self) -> None:
        self.engine.step()

    def report(self) -> dict:
        self.engine.stats.wall_s = self.seconds
        stats = self.engine.stats.report()
        host_s = stats["time_s"]["schedule"] + stats["time_s"]["bookkeeping"]
        return stats | {"host_share": host_s / sum(stats["time_s"].values())}


def race(runners: dict[str, Policy | Transformers]) -> None:
    """Run all to their end, SLICE seconds at a time in turn: when the machine is slow for a while, it is so for all."""
    while any(runner.busy for runner in runners.values()):
        for runner in runners.values():
            start = time.perf_counter()
            while runner.busy and time.perf_counter() - start < SLICE:
                runner.step()
            runner.seconds += time.perf_counter() - start


def sweep(args: argparse.Namespace, policies: list[str]) -> list[dict]:
    """One row per kind of prompts, policy and concurrency: medians over the rounds."""
    options = {"model": args.model, "max_num_seqs": max(args.concurrency), "compile": args.compile}
    options |= {"device": args.device, "max_model_len": PROMPT_LENGTH + args.max_tokens + 1}
    options["cost_table"] = Engine(**options).cost_table  # all policies predict with the same one
    runners = {p: Transformers(args.model) if p == "transformers" else Policy(p, options) for p in policies}
    params = SamplingParams(args.temperature, args.max_tokens, ignore_eos=True)
    measured = ["tokens_per_s", "host_share", "median_cost_error", "mean_accepted_length", "mean_budget_per_request"]
    rows = []
    loads = [(kind, concurrency) for kind in args.prompts for concurrency in args.concurrency]
    bar = tqdm(total=len(loads) * args.rounds, leave=False)
    for kind, concurrency in loads:
        results = {policy: [] for policy in policies}
        for turn in range(args.rounds):
            bar.set_description(f"{kind}, {concurrency} requests")
            prompts = held_out_prompts(max(args.waves * concurrency, args.min_requests), 7 + turn, PROMPT_LENGTH, kind)
            for runner in runners.values():
                runner.start(prompts, params, concurrency)
            race(runners)
            for policy, runner in runners.items():
                results[policy].append(runner.report())
            bar.update()
        for policy, runs in results.items():
            row = {"policy": policy, "concurrency": concurrency, "prompts": kind, "temperature": args.temperature}
            for key in measured:
                values = [r[key] for r in runs if r.get(key) is not None]
                row[key] = round(statistics.median(values), 4) if values else None
            row["tokens_per_s_per_request"] = round(row["tokens_per_s"] / concurrency, 4)
            rows.append(row)
    bar.close()
    return rows


def print_tables(rows: list[dict], policies: list[str], kind: str) -> None:
    by_key = {(row["policy"], row["concurrency"]): row for row in rows if row["prompts"] == kind}
    levels = sorted({concurrency for _, concurrency in by_key})
    rivals = [policy for policy in policies if policy == "none" or policy.startswith("fixed")]

    def line(name: str, values: list[float | None], digits: int = 2, end: str = "\n") -> None:
        print(f"{name:36}" + "".join("       -" if v is None else f"{v:8.{digits}f}" for v in values), end=end)

    print(f"prompts: {kind}; requests at once        " + "".join(f"{level:>8}" for level in levels))
    for policy in policies:
        line(f"tokens/s, {policy}", [by_key[policy, level]["tokens_per_s"] for level in levels], 1)
    for policy in policies:
        line(f"accepted length, {policy}", [by_key[policy, level]["mean_accepted_length"] for level in levels])
    for policy in (p for p in policies if p.startswith("adaptive")):
        mine = [by_key[policy, level] for level in levels]
        for title, others in (("the best other", rivals), ("none", ["none"]), ("transformers", ["transformers"])):
            others = [p for p in others if p in policies]
            if others:
                best = [max(by_key[p, level]["tokens_per_s"] for p in others) for level in levels]
                ratios = [row["tokens_per_s"] / b for row, b in zip(mine, best)]
                line(f"{policy} / {title}", ratios, end=f"   geometric mean {np.exp(np.mean(np.log(ratios))):.3f}\n")
        line(f"{policy}: budget per request", [row["mean_budget_per_request"] for row in mine])
        line(f"{policy}: host time / step time", [row["host_share"] for row in mine], 3)
        line(f"{policy}: median cost error", [row["median_cost_error"] for row in mine], 3)


def plot(rows: list[dict], policies: list[str], path: str) -> None:
    """Throughput over concurrency, throughput over per-request speed, and the adaptive budget over load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for policy in policies:
        mine = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["concurrency"])
        style = {"linewidth": 2.5, "color": "black"} if policy == "adaptive" else {"linewidth": 1}
        total = [row["tokens_per_s"] for row in mine]
        load = [row["concurrency"] for row in mine]
        axes[0].plot(load, total, "o-", label=policy, markersize=3, **style)
        axes[1].plot([row["tokens_per_s_per_request"] for row in mine], total, "o-", markersize=3, **style)
        axes[2].plot(load, [row["mean_budget_per_request"] for row in mine], "o-", markersize=3, **style)
    axes[0].set(xlabel="requests at once", ylabel="tokens/s", xscale="log")
    axes[1].set(xlabel="tokens/s per request", ylabel="tokens/s", xscale="log")
    axes[2].set(xlabel="requests at once", ylabel="drafts verified per request and step", xscale="log")
    axes[0].legend(fontsize=8)
    for axis, ticks in zip(axes, (load, [10, 20, 50, 100, 200, 500], load)):
        low, high = axis.get_xlim()
        axis.set_xticks([t for t in ticks if low <= t <= high], minor=False)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument(
        "--policies", nargs="+", help=f"from {POLICIES}; default: adaptive none fixed-1 ... fixed-gamma"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="takes a minute or two (default: on CUDA only)"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", nargs="+", choices=["all", "code", "prose"], default=["all"])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--waves", type=int, default=2, help="requests per concurrent request")
    parser.add_argument("--min-requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="needs matplotlib")
    args = parser.parse_args(argv)
    try:
        gamma = Config.load(args.model).dspark_block_size
        policies = args.policies or ["adaptive", "none", *(f"fixed-{k}" for k in range(1, gamma + 1))]
        for policy in policies:
            if not POLICY.fullmatch(policy):
                raise ValueError(f"--policies {policy}: allowed: {POLICIES}")
        if "transformers" in policies and args.temperature > 0:
            raise ValueError(f"--temperature {args.temperature}: transformers is compared at 0 only")
        rows = sweep(args, policies)
        for kind in args.prompts:
            print_tables(rows, policies, kind)
        if args.output_json:
            with open(args.output_json, "w") as file:
                json.dump({"rows": rows}, file, indent=1)
        if args.plot:
            plot([row for row in rows if row["prompts"] == args.prompts[0]], policies, args.plot)
    except ModuleNotFoundError as error:
        sys.exit(f"bench.py: this needs {error.name}: pip install {error.name}")
    except (ValueError, OSError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
