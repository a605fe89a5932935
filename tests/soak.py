"""Thousands of short requests through one engine, some cancelled on the way. Does every one end as it should?

    python tests/soak.py --requests 5000

Random prompts, lengths, temperatures, stops and seeds, 32 at a time. Greedy requests must read as they do alone, no
slot may stay taken, and resident memory must stay flat.
"""

import argparse
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine import Engine, SamplingParams
from train import held_out_prompts


def resident_mb() -> float:
    """Of this process, in MB, as Linux tells it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        max_tokens=rng.randint(1, 24),
        seed=rng.randrange(2**63),
        top_k=rng.choice([0, 0, 20]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        stop=rng.choice([(), (), ("\n",), ("self", "return")]),
    )


def soak(num_requests: int, at_once: int = 32, batch: int = 100) -> tuple[Engine, list[float], dict[str, int]]:
    """Serve random requests, `batch` to a call. Returns the engine, the memory in MB after each call, and how many
    requests ended for which reason. Raises AssertionError for a request that ended wrongly."""
    engine, rng, memory, ends = Engine(max_num_seqs=at_once, max_model_len=128), random.Random(0), [], {}
    pool = held_out_prompts(64, seed=3, length=48)
    for start in range(0, num_requests, batch):
        count = min(batch, num_requests - start)
        prompts = [rng.choice(pool)[: rng.randint(1, 48)] for _ in range(count)]
        params = [random_params(rng) for _ in range(count)]
        to_cancel = rng.sample(range(count), count // 10)

        def cancel_some(record: dict, to_cancel=to_cancel) -> None:
            if to_cancel and rng.random() < 0.3:
                engine.cancel(to_cancel.pop())  # waiting, running or over already

        completions = engine.generate(prompts, params, cancel_some)
        assert not engine.busy and sorted(engine.free_slots) == list(range(at_once))
        for c in completions:
            assert c.finish_reason in ("stop", "length", "cut")
            ends[c.finish_reason] = ends.get(c.finish_reason, 0) + 1
        greedy = [i for i, p in enumerate(params) if p.temperature == 0]
        alone = engine.generate([prompts[i] for i in greedy], [params[i] for i in greedy], concurrency=1)
        for i, expected in zip(greedy, alone):
            actual = completions[i]
            if actual.finish_reason == "cut":
                assert expected.token_ids[: len(actual.token_ids)] == actual.token_ids
            else:
                assert (actual.text, actual.token_ids) == (expected.text, expected.token_ids)
                assert actual.finish_reason == expected.finish_reason
        memory.append(resident_mb())
    return engine, memory, ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    _, memory, ends = soak(parser.parse_args().requests)
    quarter = max(len(memory) // 4, 1)
    first, last = (sum(part) / quarter for part in (memory[:quarter], memory[-quarter:]))
    print(f"all as they should be; how they ended: {ends}")
    print(f"resident memory: first quarter {first:.1f} MB, last quarter {last:.1f} MB, {last / first - 1:+.2%}")


if __name__ == "__main__":
    main()
