"""Measures speculation: each workload with and without, by turns, in one run.

    python -m benchmarks.speculation.speed                    random weights of 368 million parameters
    python -m benchmarks.speculation.speed --model demo       the demo model
    python -m benchmarks.speculation.speed --only " 8 , 32 "  rows whose name (workload, streams, drafts) has such text

The answers are given beforehand (`benchmarks.speculation.texts`): a grammar that allows one token forces them, so that
any model does work with a known overlap. "known P" drafts the answer's own tokens, each right with probability P.
CPU seconds of one thread, from the first token of all requests on; the tokens of all ways are compared.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engine.cpu_engine import DEMO
from benchmarks.engine.random_llama import write_checkpoint
from benchmarks.output import JsonFile, write_figures
from benchmarks.speculation.known_drafter import KnownAnswers
from benchmarks.speculation.texts import COPYING, GivenAnswer, given_answers
from protos.values import GenerateRequest, SamplingParams
from workers.batch import Sample
from workers.build_rank import LoadedRank, build_engine, open_rank
from workers.grammar.grammar_seam import Mask
from workers.parallel.group import Solo
from workers.parallel.ranks import Leader
from workers.scheduling.role import Role
from workers.speculation.registry import speculation_of
from workers.speculation.speculation import Speculation, SpeculationCounts
from workers.worker_config import WorkerConfig

SEVERAL, FULL = 8, 32
RIGHT = (0.0, 0.2, 0.5, 0.8, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """Requests that begin together; lengths in tokens."""

    workload: str
    num_streams: int
    drafts: str = "auto"
    prompt_len: int = 448
    answer_len: int = 128

    def __str__(self) -> str:
        return f"{self.workload} {self.num_streams} {self.drafts}"


class ForcedAnswers:
    """`Grammars` that allow each request its own answer alone."""

    def __init__(self, vocab_size: int) -> None:
        self.listener: Callable[[], None] = lambda: None
        self.answers: dict[str, Sequence[int]] = {}
        self._words = -(-vocab_size // 32)

    def begin(self, request_id: str, grammar: str, output_ids: tuple[int, ...]) -> None: ...

    def pending(self) -> Collection[str]:
        return ()

    def draft(self, request_id: str, draft_ids: tuple[int, ...]) -> None: ...

    def release(self, request_ids: Collection[str]) -> None: ...

    def __len__(self) -> int:
        return 0

    def allowed(self, request_id: str, sample: Sample) -> Mask:
        return self._mask(request_id, sample.index)

    def allowed_after(self, request_id: str, samples: Sequence[Sample]) -> Sequence[Mask]:
        return [self._mask(request_id, one.index) for one in samples[1:]]

    def _mask(self, request_id: str, index: int) -> Mask:
        answer, mask = self.answers[request_id], np.zeros(self._words, dtype=np.uint32)
        token_id = answer[min(index, len(answer) - 1)]
        mask[token_id // 32] = np.uint32(1) << np.uint32(token_id % 32)
        return mask.view(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatedRun:
    """`times_off`: the median over turns of the seconds without by those with. `accepted_at`: of each position of a
    draft, the share of the drafted ones that were accepted, over all sources."""

    model: str
    workload: str
    num_streams: int
    drafts: str
    cpu_s: float
    times_off: float
    tokens_per_row: float
    num_drafted: int
    num_accepted: int
    accepted_at: tuple[float, ...]


class SpeculatingEngine:
    """One loaded model that serves given answers."""

    def __init__(self, folder: Path, dtype: str) -> None:
        config = WorkerConfig(model=str(folder), device="cpu", dtype=dtype, num_blocks=1024, speculate="auto")  # type: ignore[arg-type]
        self.rank: LoadedRank = open_rank(config, Solo())
        self.rank.storage.data.zero_()
        self.vocab_size = self.rank.model.vocab_size
        self.max_drafts = config.max_drafts
        self._leader = Leader(self.rank.group)

    def serve(
        self, given: Sequence[GivenAnswer], speculation: Speculation | None
    ) -> tuple[float, list[tuple[int, ...]]]:
        """CPU seconds from the first token of all to the end, and the answers."""
        forced = ForcedAnswers(self.vocab_size)
        forced.answers = answers_of(given)
        self.rank.runner.grammars = forced
        rank = replace(self.rank, grammars=forced)
        engine = build_engine(rank, self._leader, lambda _: Role(), incarnation=1, clock=time.process_time)
        engine.scheduler.speculation = speculation
        for number, one in enumerate(given):
            sampling = SamplingParams(temperature=0.0, max_tokens=len(one.answer_ids), grammar="forced")
            request = GenerateRequest(request_id=str(number), prompt_ids=one.prompt_ids, sampling=sampling)
            engine.submit(request, now=0.0)
        answers: list[tuple[int, ...]] = [() for _ in given]
        begun_s: float | None = None
        while engine.has_work():
            for update in engine.step(now=0.0):
                answers[int(update.request_id)] += update.token_ids
            if begun_s is None and all(answers):
                begun_s = time.process_time()
        assert begun_s is not None
        return time.process_time() - begun_s, answers

    def speculation(self, drafts: str, given: Sequence[GivenAnswer], before: Speculation | None) -> Speculation:
        """A new one, or `before`: it keeps what it has learned in earlier turns, as a worker does. One with known
        answers must know those of this turn."""
        if drafts.startswith("known"):
            right = float(drafts.split()[1])
            known = KnownAnswers(answers_of(given), right=right, vocab_size=self.vocab_size)
            made = Speculation([known], max_drafts=self.max_drafts)
            if before is not None:
                made.cost, made.acceptance, made.counts = before.cost, before.acceptance, before.counts
            return made
        fresh = before or speculation_of(drafts, max_drafts=self.max_drafts, max_bytes=2**26)
        assert fresh is not None
        return fresh

    def close(self) -> None:
        self._leader.close()


def answers_of(given: Sequence[GivenAnswer]) -> dict[str, Sequence[int]]:
    return {str(number): one.answer_ids for number, one in enumerate(given)}


def plans() -> list[SpeculationPlan]:
    kinds = [SpeculationPlan(workload=work, num_streams=1) for work in (*COPYING, "random")]
    kinds += [SpeculationPlan(workload=work, num_streams=SEVERAL) for work in ("mixed", "random")]
    kinds += [
        SpeculationPlan(workload=work, num_streams=FULL, prompt_len=64, answer_len=32) for work in ("mixed", "random")
    ]
    known = [
        SpeculationPlan(workload="random", num_streams=1, drafts=f"known {right:g}", prompt_len=64) for right in RIGHT
    ]
    return kinds + known


def measured(name: str, engine: SpeculatingEngine, plan: SpeculationPlan, turns: int) -> SpeculatedRun:
    off_s, on_s = list[float](), list[float]()
    speculation: Speculation | None = None
    for turn in range(turns + 1):  # the first warms up
        given = given_answers(
            plan.workload,
            plan.num_streams,
            prompt_len=plan.prompt_len,
            answer_len=plan.answer_len,
            seed=turn,
            vocab_size=engine.vocab_size,
        )
        speculation = engine.speculation(plan.drafts, given, speculation)
        if turn == 1:
            speculation.counts = SpeculationCounts()
        ways: tuple[tuple[list[float], Speculation | None], ...] = ((off_s, None), (on_s, speculation))
        for seconds, way in ways:
            elapsed_s, answers = engine.serve(given, way)
            assert answers == [one.answer_ids for one in given], "an answer has changed"
            if turn:
                seconds.append(elapsed_s)
    assert speculation is not None
    counts = speculation.counts
    drafted, accepted = list[int](), list[int]()
    for source in counts.sources.values():
        drafted = [sum(pair) for pair in zip_longest(drafted, source.drafted_at, fillvalue=0)]
        accepted = [sum(pair) for pair in zip_longest(accepted, source.accepted_at, fillvalue=0)]
    return SpeculatedRun(
        model=name,
        workload=plan.workload,
        num_streams=plan.num_streams,
        drafts=plan.drafts,
        cpu_s=median(on_s),
        times_off=median([off / on for off, on in zip(off_s, on_s, strict=True)]),
        tokens_per_row=counts.num_tokens / counts.num_rows,
        num_drafted=counts.num_drafted,
        num_accepted=counts.num_accepted,
        accepted_at=tuple([round(right / all_, 3) for right, all_ in zip(accepted, drafted, strict=True)]),
    )


def main(
    model: Annotated[str, typer.Option(help="368M (random weights) or demo.")] = "368M",
    only: Annotated[str, typer.Option(help="Rows whose name has one of these texts, with commas.")] = "",
    turns: Annotated[int, typer.Option(help="Turns of each pair; the median counts.")] = 3,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    json_file: JsonFile = None,
) -> None:
    torch.set_num_threads(1)
    found: list[SpeculatedRun] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = DEMO if model == "demo" else Path(temporary)
        if model != "demo":
            write_checkpoint(folder)
        engine = SpeculatingEngine(folder, dtype)
        for plan in plans():
            if any(part in str(plan) for part in only.split(",")):
                found.append(measured(model, engine, plan, turns))
                print(found[-1], flush=True)
                write_figures(json_file, runs=[asdict(one) for one in found])
        engine.close()
    table = Table("model", "work", "streams", "drafts", "CPU s", "times off", "tokens a row", "drafted", "accepted")
    for one in found:
        counts = (f"{one.tokens_per_row:.2f}", str(one.num_drafted), str(one.num_accepted))
        times = (f"{one.cpu_s:.2f}", f"{one.times_off:.2f}")
        table.add_row(one.model, one.workload, str(one.num_streams), one.drafts, *times, *counts)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
