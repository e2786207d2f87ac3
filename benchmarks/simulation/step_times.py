"""Measures this machine's step times, as points for `baton simulate --calibration`.

python -m benchmarks.simulation.step_times > steps.json          the demo model, one thread
python -m benchmarks.simulation.step_times --model FOLDER --threads 2
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.cpu_engine import DEMO, opened
from protos.values import GenerateRequest, SamplingParams
from workers.batch import Batch, PendingStep
from workers.engine.engine import Engine

# (sequences, tokens of each prompt, tokens of each answer)
LOADS = ((1, 16, 24), (1, 128, 24), (1, 700, 24), (2, 60, 24), (4, 200, 24), (8, 100, 24), (12, 300, 16), (3, 900, 16))


class Watched:
    """A pipeline that remembers the batches it was given."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self.batches: list[Batch] = []

    def launch(self, batch: Batch) -> PendingStep:
        self.batches.append(batch)
        pending: PendingStep = self._pipeline.launch(batch)
        return pending


def measured(engine: Engine, loads: tuple[tuple[int, int, int], ...]) -> list[dict[str, Any]]:
    """Every step of these loads, host work included, the first load left out: it warms up."""
    watched = Watched(engine._pipeline)
    engine._pipeline = watched
    chance = random.Random(0)
    points: list[dict[str, Any]] = []
    for number, (num, prompt, answer) in enumerate((loads[0], *loads)):
        for index in range(num):
            sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
            prompt_ids = tuple(chance.randrange(3, 4000) for _ in range(prompt))
            engine.submit(
                GenerateRequest(request_id=f"{number}.{index}", prompt_ids=prompt_ids, sampling=sampling), now=0.0
            )
        while engine.has_work():
            watched.batches.clear()
            start = time.perf_counter()
            engine.step(now=0.0)
            seconds = time.perf_counter() - start
            if number and watched.batches:
                rows = [[row.num_tokens, row.stop] for batch in watched.batches for row in batch.rows]
                points.append({"rows": rows, "seconds": seconds})
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with opened(given.model) as engine:
        json.dump(measured(engine, LOADS), sys.stdout)


if __name__ == "__main__":
    main()
