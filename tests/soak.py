"""Many short requests through one engine: does resident memory stay flat?

python tests/soak.py --requests 2000
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


def soak(num_requests: int, at_once: int = 32, batch: int = 50) -> tuple[Engine, list[float]]:
    """Serve `num_requests` random requests, `batch` to a call. Returns the engine and the memory, MB, after each call."""
    engine, rng, memory = Engine(max_num_seqs=at_once, max_model_len=128), random.Random(0), []
    pool = held_out_prompts(64, seed=3, length=48)
    for start in range(0, num_requests, batch):
        count = min(batch, num_requests - start)
        prompts = [rng.choice(pool)[: rng.randint(1, 48)] for _ in range(count)]
        params = [SamplingParams(rng.choice([0.0, 0.7, 1.0]), rng.randint(1, 32), seed=i) for i in range(count)]
        completions = engine.generate(prompts, params)
        assert len(completions) == count and all(c.finish_reason in ("stop", "length") for c in completions)
        assert sorted(engine.free_slots) == list(range(at_once))
        memory.append(resident_mb())
    return engine, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    _, memory = soak(parser.parse_args().requests)
    quarter = max(len(memory) // 4, 1)
    first, last = (sum(part) / quarter for part in (memory[:quarter], memory[-quarter:]))
    print(f"resident memory: first quarter {first:.1f} MB, last quarter {last:.1f} MB, {last / first - 1:+.2%}")


if __name__ == "__main__":
    main()
