"""Throughput over concurrency: adaptive verification against every fixed draft length and no speculation.

    python bench.py                                       # 1, 4, 16 and 64 requests at once, temperature 1
    python bench.py --concurrency 1 8 --policies adaptive none --prompts prose

Policies take turns inside one process on the same prompts, several rounds, and the median counts: machines drift.
"""

import argparse
import json
import statistics
import sys

import numpy as np
from tqdm import tqdm

from engine import DEFAULT_MODEL, Engine, SamplingParams
from train import held_out_prompts


def make_engine(policy: str, options: dict) -> Engine:
    """The engine of a policy: adaptive, adaptive-stale, adaptive-early-stop, none, or fixed-K."""
    kind, _, argument = policy.partition("-")
    if kind == "adaptive":
        return Engine(**options, budget_rule=argument or "auto")
    if policy == "none":
        return Engine(**options, num_speculative_tokens=0)
    if kind == "fixed" and argument.isdigit() and argument != "0":
        return Engine(**options, num_speculative_tokens=int(argument), adaptive_verification=False)
    raise ValueError(f"--policies {policy}: allowed: adaptive, adaptive-stale, adaptive-early-stop, none, fixed-K")


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams, concurrency: int) -> dict:
    """One measurement; times in seconds, per-request speed in tokens per second."""
    engine.generate(prompts, params, concurrency=concurrency)
    stats = engine.stats.report()
    host_s = stats["time_s"]["schedule"] + stats["time_s"]["bookkeeping"]
    stats["tokens_per_s_per_request"] = stats["tokens_per_s"] / concurrency
    stats["host_share"] = host_s / sum(stats["time_s"].values())
    return stats


def sweep(args: argparse.Namespace, policies: list[str]) -> list[dict]:
    most = max(args.concurrency)
    engines = {policy: make_engine(policy, {"model": args.model, "max_num_seqs": most}) for policy in policies}
    params = SamplingParams(args.temperature, args.max_tokens, ignore_eos=True)
    rows, keys = [], ["tokens_per_s", "tokens_per_s_per_request", "host_share", "median_cost_error"]
    bar = tqdm(total=len(args.concurrency) * args.rounds * len(policies), leave=False)
    for concurrency in args.concurrency:
        prompts = held_out_prompts(max(args.waves * concurrency, args.min_requests), seed=7, kind=args.prompts)
        results = {policy: [] for policy in policies}
        for turn in range(args.rounds):
            shift = turn % len(policies)  # nobody is always the first
            for policy in policies[shift:] + policies[:shift]:
                bar.set_description(f"{concurrency} requests, {policy}")
                results[policy].append(run(engines[policy], prompts, params, concurrency))
                bar.update()
        for policy, runs in results.items():
            medians = {key: round(statistics.median(r[key] for r in runs), 4) for key in keys}
            counts = {key: runs[0][key] for key in ("mean_accepted_length", "mean_budget_per_request")}
            rows.append({"policy": policy, "concurrency": concurrency, "prompts": args.prompts} | medians | counts)
    bar.close()
    return rows


def print_table(rows: list[dict], policies: list[str]) -> None:
    by_key = {(row["policy"], row["concurrency"]): row for row in rows}
    levels = sorted({row["concurrency"] for row in rows})
    rivals = [policy for policy in policies if not policy.startswith("adaptive")]
    print("tokens/s       " + "".join(f"{level:>9}" for level in levels))
    for policy in policies:
        print(f"{policy:15}" + "".join(f"{by_key[policy, level]['tokens_per_s']:9.1f}" for level in levels))
    for policy in (p for p in policies if p.startswith("adaptive")):
        mine = [by_key[policy, level] for level in levels]
        if rivals:
            best = [max(by_key[p, level]["tokens_per_s"] for p in rivals) for level in levels]
            ratios = [row["tokens_per_s"] / b for row, b in zip(mine, best)]
            print(f"{policy} / best other   " + " ".join(f"{r:.2f}" for r in ratios), end="")
            print(f"   geometric mean {np.exp(np.mean(np.log(ratios))):.3f}")
        for name, key in (
            ("budget per request", "mean_budget_per_request"),
            ("accepted length", "mean_accepted_length"),
            ("host share of step", "host_share"),
            ("median cost error", "median_cost_error"),
        ):
            print(f"{policy} {name}   " + " ".join(f"{row[key] or 0:.3f}" for row in mine))


def plot(rows: list[dict], policies: list[str], path: str) -> None:
    """Throughput over concurrency, throughput over per-request speed, and the adaptive budget over load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for policy in policies:
        mine = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["concurrency"])
        style = {"linewidth": 2.5, "color": "crimson"} if policy == "adaptive" else {"linewidth": 1}
        total = [row["tokens_per_s"] for row in mine]
        load = [row["concurrency"] for row in mine]
        axes[0].plot(load, total, "o-", label=policy, markersize=3, **style)
        axes[1].plot([row["tokens_per_s_per_request"] for row in mine], total, "o-", markersize=3, **style)
        axes[2].plot(load, [row["mean_budget_per_request"] for row in mine], "o-", markersize=3, **style)
    axes[0].set(xlabel="requests at once", ylabel="tokens/s", xscale="log")
    axes[1].set(xlabel="tokens/s per request", ylabel="tokens/s", xscale="log")
    axes[2].set(xlabel="requests at once", ylabel="drafts verified per request and step", xscale="log")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--policies", nargs="+", help="default: adaptive none fixed-1 ... fixed-gamma")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", choices=["all", "code", "prose"], default="all")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--waves", type=int, default=2, help="requests per concurrent request")
    parser.add_argument("--min-requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="needs matplotlib")
    args = parser.parse_args()
    try:
        gamma = Engine(args.model, max_num_seqs=1).gamma
        policies = args.policies or ["adaptive", "none", *(f"fixed-{k}" for k in range(1, gamma + 1))]
        rows = sweep(args, policies)
        print_table(rows, policies)
        if args.output_json:
            with open(args.output_json, "w") as file:
                json.dump({"rows": rows}, file, indent=1)
        if args.plot:
            plot(rows, policies, args.plot)
    except ModuleNotFoundError as error:
        sys.exit(f"bench.py: --plot needs {error.name}: pip install {error.name}")
    except (ValueError, OSError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
