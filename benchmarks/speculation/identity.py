"""Compares answers with and without speculation, for a generated matrix of requests over every sampling option.

    python -m benchmarks.speculation.identity          600 requests on the demo model, float32 and bfloat16
    python -m benchmarks.speculation.identity --model FOLDER --requests 200
    python -m benchmarks.speculation.identity --num-blocks 8                    sequences are preempted
    python -m benchmarks.speculation.identity --tp 2                            two ranks, as threads of this process
    python -m benchmarks.speculation.identity --speculate eagle:demo/eagle3     the worker's own proposer is a head
    python -m benchmarks.speculation.identity --done FILE --minutes 10          in several runs: see below

Each dtype is served four times: without drafts, by the worker's own proposers, by drafts that are right half of the
time, and by random drafts. Tokens, logprobs and finish reasons must be the same, logprobs to the bit. Sequences are
preempted where the cache is small: with `--num-blocks 8`, about one in eight of the demo model's.

The matrix is served in parts, and each part prints a line for each way to serve it. With `--done FILE` these lines are
kept, and a run leaves out the parts that the file has; `--minutes` ends a run after the part in which they are over.
"""

from __future__ import annotations

import json
import math
import operator
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engine.cpu_engine import DEMO
from benchmarks.speculation.known_drafter import KnownAnswers
from protos.values import FinishReason, GenerateRequest, Logprobs, SamplingParams, SpeculationParams
from workers.build_rank import LoadedRank, build_engine, follow_rank0, make_transfer, open_rank
from workers.engine.engine import Engine
from workers.parallel.ranks import Leader, find_store, join_group, open_store
from workers.scheduling.role import Role
from workers.speculation.proposer import Proposer
from workers.speculation.speculation import Speculation
from workers.worker_config import WorkerConfig

BATCH = 40
"""Requests that are served together."""
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
SCHEMAS: tuple[object, ...] = (
    {"type": "object", "properties": {"name": _TEXT, "age": _NUMBER}, "required": ["name", "age"]},
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 6},
    {"type": "object", "properties": {"tool": {"const": "find"}, "query": _TEXT}, "required": ["tool", "query"]},
)


@dataclass(slots=True)
class ServedAnswer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One way to serve the matrix. `different` are the ids of requests whose answers differ from those of "off"."""

    name: str
    num_requests: int
    num_steps: int
    num_preemptions: int
    num_drafted: int
    num_accepted: int
    seconds: float
    different: tuple[str, ...]

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            name=self.name,
            num_requests=self.num_requests + other.num_requests,
            num_steps=self.num_steps + other.num_steps,
            num_preemptions=self.num_preemptions + other.num_preemptions,
            num_drafted=self.num_drafted + other.num_drafted,
            num_accepted=self.num_accepted + other.num_accepted,
            seconds=self.seconds + other.seconds,
            different=(*self.different, *other.different),
        )


def matrix(count: int, *, vocab_size: int, eos_id: int, with_grammars: bool, seed: int = 0) -> list[GenerateRequest]:
    """Requests in which each option is drawn by itself, so that options meet one another."""
    return [
        _request(f"{number:04}", Random(f"{seed}.{number}"), vocab_size, eos_id, with_grammars)
        for number in range(count)
    ]


def _request(name: str, chance: Random, vocab_size: int, eos_id: int, with_grammars: bool) -> GenerateRequest:
    piece = [chance.randrange(3, vocab_size) for _ in range(chance.randrange(2, 24))]
    between = [chance.randrange(3, vocab_size) for _ in range(chance.randrange(9))]
    prompt_ids = (*piece, *between, *piece)
    grammar = "%json " + json.dumps(chance.choice(SCHEMAS)) if with_grammars and chance.random() < 0.25 else ""
    max_tokens = chance.choice((0, 1, 2, 7, 24, 40))
    sampling = SamplingParams(
        temperature=chance.choice((0.0, 0.0, 0.3, 1.0, 1.7)),
        top_k=chance.choice((0, 0, 1, 20)),
        top_p=chance.choice((1.0, 0.9, 0.4)),
        min_p=chance.choice((0.0, 0.0, 0.1)),
        repetition_penalty=chance.choice((1.0, 1.0, 1.2)),
        presence_penalty=chance.choice((0.0, 0.0, 0.7)),
        frequency_penalty=chance.choice((0.0, 0.0, -0.4, 0.6)),
        logit_bias=((chance.randrange(3, vocab_size), chance.choice((-100.0, 3.0))),) if chance.random() < 0.2 else (),
        seed=chance.randrange(2**64),
        logprobs=chance.choice((None, None, 0, 3)),
        prompt_logprobs=chance.choice((None, None, None, 1)),
        min_tokens=chance.choice((0, 0, min(5, max_tokens))),
        max_tokens=max_tokens,
        stop_token_ids=tuple(chance.sample(range(3, vocab_size), 40)) if chance.random() < 0.3 else (),
        ignore_eos=not grammar and chance.random() < 0.3,
        grammar=f"start: {grammar}" if grammar else "",
        speculation=SpeculationParams(prediction_ids=tuple(piece) if chance.random() < 0.2 else ()),
    )
    return GenerateRequest(request_id=name, prompt_ids=prompt_ids, sampling=sampling)


def serve(engine: Engine, requests: Sequence[GenerateRequest]) -> dict[str, ServedAnswer]:
    """All at once; books are checked after every step."""
    answers = {one.request_id: ServedAnswer() for one in requests}
    for request in requests:
        engine.submit(request, now=0.0)
    while engine.has_work():
        for update in engine.step(now=0.0):
            answer = answers[update.request_id]
            answer.token_ids += update.token_ids
            answer.logprobs += update.logprobs
            answer.prompt_logprobs += update.prompt_logprobs
            answer.finish_reason = update.finish_reason
            answer.error = update.error.message if update.error is not None else ""
        engine.check_integrity()
    engine.assert_idle()
    return answers


Dtype = Literal["float32", "bfloat16"]
WAYS: Mapping[str, float | None] = {"own": None, "half right": 0.5, "random": 0.0}
"""Proposers by name: the share of right drafts, or None for the worker's own proposers."""


def compare(
    model: Path,
    dtype: Dtype,
    count: int,
    *,
    before: Sequence[GenerateRequest] = (),
    num_blocks: int = 24,
    proposers: Mapping[str, float | None] = WAYS,
) -> list[Comparison]:
    """The requests `before` and the whole matrix, as one part."""
    part = len(before) + count
    return list(
        compare_parts(model, dtype, count, part=part, before=before, num_blocks=num_blocks, proposers=proposers)
    )


def compare_parts(
    model: Path,
    dtype: Dtype,
    count: int,
    *,
    part: int,
    before: Sequence[GenerateRequest] = (),
    num_blocks: int = 24,
    proposers: Mapping[str, float | None] = WAYS,
    done: Collection[int] = (),
    tp: int = 1,
    speculate: str = "auto",
) -> Iterator[Comparison]:
    """Of each part of the matrix the comparisons of all ways, "off" first. Parts in `done` are left out."""
    config = WorkerConfig(
        model=str(model), device="cpu", dtype=dtype, num_blocks=num_blocks, speculate=speculate, tp=tp
    )
    with leading(config) as (rank, leader):
        vocab_size, eos_id = min(rank.model.vocab_size, 4000), rank.model.eos_token_ids[0]
        requests = [*before, *matrix(count, vocab_size=vocab_size, eos_id=eos_id, with_grammars=True)]
        for number, first in enumerate(range(0, len(requests), part)):
            plain: dict[str, ServedAnswer] = {}
            for name, right in ({"off": None} | dict(proposers)).items() if number not in done else ():
                answers, comparison = _serve_part(rank, leader, requests[first : first + part], plain, name, right)
                plain = plain or answers
                yield comparison


@contextmanager
def leading(config: WorkerConfig) -> Iterator[tuple[LoadedRank, Leader]]:
    """Rank 0 of a worker whose ranks are threads of this process."""
    store = open_store("127.0.0.1")
    stores = [store, *(find_store("127.0.0.1", store.port, key=store.key) for _ in range(1, config.tp))]

    def open_one(number: int) -> LoadedRank:
        group = join_group(stores[number], rank=number, size=config.tp, name="identity", device="cpu", timeout_s=60.0)
        return open_rank(config, group)

    with ThreadPoolExecutor(config.tp) as pool:
        first, *others = pool.map(open_one, range(config.tp))
        followers = [pool.submit(follow_rank0, rank, make_transfer(rank)) for rank in others]
        leader = Leader(first.group)
        try:
            yield first, leader
        finally:
            leader.close()
            for one in stores:
                one.close()
        for follower in followers:
            follower.result()


def _serve_part(
    rank: LoadedRank,
    leader: Leader,
    requests: Sequence[GenerateRequest],
    plain: Mapping[str, ServedAnswer],
    name: str,
    right: float | None,
) -> tuple[dict[str, ServedAnswer], Comparison]:
    """By a new engine, in batches. `plain`: the answers without drafts, none for "off"."""
    engine = build_engine(rank, leader, lambda _: Role(), incarnation=1, clock=lambda: 0.0)
    speculation = engine.scheduler.speculation
    assert speculation is not None
    if right is not None:
        known = {request_id: answer.token_ids for request_id, answer in plain.items()}
        drafter: Proposer = KnownAnswers(known, right=right, vocab_size=rank.model.vocab_size)
        speculation = Speculation([drafter], max_drafts=speculation.max_drafts)
    engine.scheduler.speculation = None if name == "off" else speculation
    answers: dict[str, ServedAnswer] = {}
    before = speculation.load()  # of earlier parts: a rank has one speculation
    start_s = time.process_time()
    for first in range(0, len(requests), BATCH):
        answers |= serve(engine, requests[first : first + BATCH])
    load = speculation.load()
    return answers, Comparison(
        name=name,
        num_requests=len(requests),
        num_steps=engine.num_steps,
        num_preemptions=engine.scheduler.num_preemptions,
        num_drafted=load.num_drafted - before.num_drafted,
        num_accepted=load.num_accepted - before.num_accepted,
        seconds=time.process_time() - start_s,
        different=tuple([one for one in answers if plain and answers[one] != plain[one]]),
    )


def main(
    model: Annotated[Path, typer.Option(help="A checkpoint.")] = DEMO,
    requests: Annotated[int, typer.Option(help="Requests of the matrix.")] = 600,
    num_blocks: Annotated[int, typer.Option(help="Blocks of the cache.")] = 24,
    dtype: Annotated[list[str] | None, typer.Option(help="float32 or bfloat16. Default: both.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    speculate: Annotated[str, typer.Option(help="The worker's own proposers, as --speculate of baton.")] = "auto",
    part: Annotated[int, typer.Option(help="Requests of a part.")] = 60,
    done: Annotated[Path | None, typer.Option(help="A file of the parts that have been compared.")] = None,
    minutes: Annotated[float, typer.Option(help="The run ends after the part in which they are over.")] = math.inf,
) -> None:
    console, failed, stop_s = Console(), False, time.monotonic() + 60 * minutes
    for kind in dtype or ["float32", "bfloat16"]:
        key = f"{model} {kind} {requests} {part} {num_blocks} {tp} {speculate}"
        parts = _parts_of(done, key)
        num_ways, num_parts = 1 + len(WAYS), -(-requests // part)
        missing = [number for number in range(num_parts) if number not in parts]
        found: list[Comparison] = []
        compared = compare_parts(
            model, kind, requests,  # type: ignore[arg-type]
            part=part, num_blocks=num_blocks, done=parts.keys(), tp=tp, speculate=speculate,
        )  # fmt: skip
        for one in compared:
            found.append(one)
            console.print(f"{kind} part {missing[0] + 1} of {num_parts}: {one.name}, {one.seconds:.1f} s", end=", ")
            console.print(f"different: {', '.join(one.different) or 'none'}")
            if len(found) == num_ways:
                number, parts[number] = missing.pop(0), found
                if done is not None:
                    with done.open("a", encoding="utf-8") as file:
                        file.write(
                            json.dumps({"key": key, "part": number, "ways": [asdict(one) for one in found]}) + "\n"
                        )
                found = []
                if time.monotonic() > stop_s:
                    break
        failed |= _show(console, f"{kind}, tp {tp}, {speculate}", list(parts.values()))
        if missing:
            console.print(f"{len(missing)} of {num_parts} parts are left")
            raise typer.Exit(code=1)
    raise typer.Exit(code=int(failed))


def _parts_of(done: Path | None, key: str) -> dict[int, list[Comparison]]:
    """The parts in the file, by number."""
    if done is None or not done.exists():
        return {}
    lines = [json.loads(line) for line in done.read_text(encoding="utf-8").splitlines()]
    return {
        line["part"]: [Comparison(**way | {"different": tuple(way["different"])}) for way in line["ways"]]
        for line in lines
        if line["key"] == key
    }


def _show(console: Console, title: str, parts: Sequence[Sequence[Comparison]]) -> bool:
    """Prints the sum of the parts. Returns whether an answer differs."""
    table = Table(
        "drafts", "requests", "steps", "preemptions", "drafted", "accepted", "CPU s", "different", title=title
    )
    failed = False
    for ways in zip(*parts, strict=True):
        one = reduce(operator.add, ways)
        counts = (one.num_requests, one.num_steps, one.num_preemptions, one.num_drafted, one.num_accepted)
        table.add_row(one.name, *map(str, counts), f"{one.seconds:.1f}", ", ".join(one.different) or "none")
        failed = failed or bool(one.different)
    console.print(table)
    return failed


if __name__ == "__main__":
    typer.run(main)
