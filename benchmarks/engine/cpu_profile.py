"""Shows how long each part of a step takes, in CPU time of one thread.

python -m benchmarks.engine.cpu_profile                     the demo model and the random one of 368 million parameters
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine.cpu_engine import DEMO, opened
from benchmarks.engine.random_llama import write_checkpoint
from protos.values import GenerateRequest, SamplingParams
from workers.attention.cpu import NativeAttention
from workers.engine.engine import Engine
from workers.kernels import cpu
from workers.runner import torch_runner
from workers.scheduling.scheduler import Scheduler
from workers.weights.formats.float_matrix import FloatMatrix

PARTS: tuple[tuple[Any, str, str], ...] = (
    (FloatMatrix, "__call__", "products"),
    (NativeAttention, "attend", "attention"),
    (NativeAttention, "write", "rope, KV write"),
    (cpu, "add_rms_norm", "norms"),
    (cpu, "silu_mul", "gates"),
    (torch_runner.Sampling, "fetch", "fetching"),
    (torch_runner, "pack", "packing"),
    (torch_runner, "sample", "sampling"),
    (Scheduler, "plan", "planning"),
    (Scheduler, "apply", "applying"),
)
LOADS = ((1, 256, 12), (16, 256, 8))


def profile(engine: Engine, num_requests: int, input_len: int, output_len: int) -> dict[str, Counter[str]]:
    """Seconds of each part, of a whole prompt step ("prompts") and of the mean decode step ("answers")."""
    spent: Counter[str] = Counter()

    def timed(work: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            found = work(*args, **kwargs)
            spent[part] += time.thread_time() - start  # type: ignore[assignment]
            return found

        return call

    patches = [patch.object(owner, name, timed(getattr(owner, name), part)) for owner, name, part in PARTS]
    for one in patches:
        one.start()
    try:
        return steps_of(engine, num_requests, input_len, output_len, spent)
    finally:
        for one in patches:
            one.stop()


def steps_of(
    engine: Engine, num_requests: int, input_len: int, output_len: int, spent: Counter[str]
) -> dict[str, Counter[str]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    for index in range(num_requests):
        prompt_ids = tuple(random.randrange(3, 4000) for _ in range(input_len))
        engine.submit(GenerateRequest(request_id=str(index), prompt_ids=prompt_ids, sampling=sampling), now=0.0)
    steps: list[Counter[str]] = []
    while engine.has_work():
        spent.clear()
        start = time.thread_time()
        engine.step(now=0.0)
        steps.append(Counter({**spent, "all": time.thread_time() - start}))
    answers = steps[1 - output_len :]
    middle = sorted(answers, key=lambda step: step["all"])[len(answers) // 2]
    return {"prompts": sum(steps[: 1 - output_len], Counter()), "answers": middle}


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title="milliseconds of one core: all prompts together, and the median step of the answers")
    table.add_column("load")
    names = ["all", *(part for _, _, part in PARTS), "other"]
    for name in names:
        table.add_column(name, justify="right")
    with tempfile.TemporaryDirectory() as scratch:
        write_checkpoint(Path(scratch))
        for model, folder in (("demo", DEMO), ("368M", Path(scratch))):
            # A step in one call has no parts to time: this times it layer by layer, with Python between.
            with patch.object(torch_runner, "fused_layers", return_value=None), opened(folder) as engine:
                profile(engine, 1, 32, 3)
                for load in LOADS:
                    for phase, spent in profile(engine, *load).items():
                        spent["other"] = 2 * spent["all"] - spent.total()
                        cells = [f"{spent[name] * 1000:,.2f}" for name in names]
                        table.add_row(f"{model}, {load[0]} x {load[1]}, {phase}", *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
