"""Acceptance by position of the demo model's heads on held-out prompts, and what they save.

    python -m benchmarks.speculation.heads

The prompts are the questions and the beginnings of sources in `demo/model/held_out.json`, which neither the model nor
its heads were trained on. Acceptance: every draft is as long as it may be, whatever it costs. Time: by turns with
speculation off, one stream, drafts as the worker chooses them; CPU seconds of one thread after the first token. The
tokens of both are compared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.engine.cpu_engine import DEMO
from benchmarks.output import JsonFile, write_figures
from protos.values import GenerateRequest, SamplingParams
from workers.build_rank import build_engine, open_rank
from workers.engine.engine import Engine
from workers.parallel.group import Solo
from workers.parallel.ranks import Leader
from workers.scheduling.role import Role
from workers.worker_config import WorkerConfig

MODES = (f"eagle:{DEMO.parent / 'eagle3'}", f"medusa:{DEMO.parent / 'medusa'}")
MAX_DRAFTS = 4
ANSWER = 64
SOURCE_PROMPT = 96
ASSISTANT = "<|assistant|>"
Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutRun:
    """`accepted`: for each position, the share of drafts that were accepted up to it. `times_off`: None if no time was
    taken."""

    mode: str
    prompts: str
    temperature: float
    num_prompts: int
    num_tokens: int
    accepted: tuple[float, ...]
    tokens_per_step: float
    times_off: float | None = None


def held_out_prompts(folder: Path, count: int) -> dict[str, Prompts]:
    """Questions without their answers, and the first tokens of source passages."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = json.loads((folder / "held_out.json").read_text(encoding="utf-8"))

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    return {
        "questions": [ids(text[: text.index(ASSISTANT) + len(ASSISTANT)]) for text in texts["chat"][:count]],
        "sources": [ids(text)[:SOURCE_PROMPT] for text in texts["source"][:count]],
    }


@contextmanager
def speculating(mode: str, *, timed: bool, dtype: str = "bfloat16") -> Iterator[Engine]:
    """An engine on the demo model. Without `timed` no step takes time, so that every draft pays."""
    config = WorkerConfig(
        model=str(DEMO), device="cpu", dtype=dtype, num_blocks=512, speculate=mode, max_drafts=MAX_DRAFTS  # type: ignore[arg-type]
    )  # fmt: skip
    rank = open_rank(config, Solo())
    leader = Leader(rank.group)
    clock = time.monotonic if timed else lambda: 0.0
    yield build_engine(rank, leader, lambda _: Role(), incarnation=1, clock=clock)
    leader.close()


def serve(engine: Engine, prompts: Prompts, temperature: float, *, at_once: int = 8) -> tuple[list[list[int]], float]:
    """The answers, and the CPU seconds of decoding."""
    answers: dict[str, list[int]] = {}
    elapsed_s = 0.0
    for first in range(0, len(prompts), at_once):
        part = list(enumerate(prompts[first : first + at_once], first))
        for number, prompt_ids in part:
            sampling = SamplingParams(temperature=temperature, seed=number, max_tokens=ANSWER)
            engine.submit(GenerateRequest(request_id=str(number), prompt_ids=prompt_ids, sampling=sampling), now=0.0)
            answers[str(number)] = []
        while engine.has_work():
            decodes = all(answers[str(number)] for number, _ in part)
            start_s = time.process_time()
            for update in engine.step(now=0.0):
                assert update.error is None, update.error
                answers[update.request_id] += update.token_ids
            elapsed_s += time.process_time() - start_s if decodes else 0.0
    return list(answers.values()), elapsed_s


def acceptance(mode: str, name: str, prompts: Prompts, temperature: float, times_off: float | None) -> HeldOutRun:
    with speculating(mode, timed=False) as engine:
        answers, _ = serve(engine, prompts, temperature)
        speculation = engine.scheduler.speculation
        assert speculation is not None
        (counts,) = speculation.counts.sources.values()
        load = speculation.load()
    pairs = zip(counts.accepted_at, counts.drafted_at, strict=True)
    return HeldOutRun(
        mode=mode.partition(":")[0],
        prompts=name,
        temperature=temperature,
        num_prompts=len(prompts),
        num_tokens=sum(map(len, answers)),
        accepted=tuple([accepted / drafted for accepted, drafted in pairs]),
        tokens_per_step=load.num_tokens / load.num_rows,
        times_off=times_off,
    )


def times_off(mode: str, prompts: Prompts, temperature: float, turns: int) -> float:
    """How many times as fast as without drafts; the median of turns, of which the first warms up."""
    found = []
    with speculating("off", timed=True) as without, speculating(mode, timed=True) as engine:
        for turn in range(turns + 1):
            plain, off_s = serve(without, prompts, temperature, at_once=1)
            drafted, on_s = serve(engine, prompts, temperature, at_once=1)
            assert plain == drafted, "an answer has changed"
            if turn:
                found.append(off_s / on_s)
    return median(found)


def main(
    count: Annotated[int, typer.Option(help="Prompts of each kind.")] = 32,
    turns: Annotated[int, typer.Option(help="Turns of the measured time; 0: none.")] = 3,
    json_file: JsonFile = None,
) -> None:
    torch.set_num_threads(1)
    table = Table("head", "prompts", "temperature", "accepted up to position 1, 2, ...", "tokens a step", "times off")
    runs = []
    for mode in MODES:
        for name, prompts in held_out_prompts(DEMO, count).items():
            for temperature in (0.0, 0.7):
                times = times_off(mode, prompts[:8], temperature, turns) if turns and not temperature else None
                run = acceptance(mode, name, prompts, temperature, times)
                runs.append(run)
                shares = " ".join(f"{share:.2f}" for share in run.accepted)
                shown = f"{times:.2f}" if times is not None else ""
                table.add_row(run.mode, name, f"{temperature:g}", shares, f"{run.tokens_per_step:.2f}", shown)
    Console().print(table)
    write_figures(json_file, runs=[asdict(one) for one in runs])


if __name__ == "__main__":
    typer.run(main)
