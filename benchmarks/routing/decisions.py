"""Measures how long a gateway takes to decide where one request goes, by its number of workers.

    python -m benchmarks.routing.decisions                       4, 16, 100 and 1,000 workers, half of them prefill
    python -m benchmarks.routing.decisions --workers 2000 --json f.json

Between two decisions 25 workers report another load, and the predictor learns from two handovers. Mean CPU time.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast

import typer

from benchmarks.output import JsonFile, write_figures
from protos.values import WorkerLoad, WorkerRole
from router.fleet.candidate_table import FleetTable
from router.fleet.member import Member, WorkerState
from router.prefix.index import Match
from router.router_config import RouterConfig
from router.routing.decision import RequestView
from router.routing.pair import kept_candidates
from router.routing.predictor import Predictor
from router.routing.registry import policy_of
from router.routing.request_seconds import estimate

BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFigures:
    """Seconds: `offer_s` until candidates are known, `choose_s` the policy's, `keep_s` what the record takes."""

    num_workers: int
    offer_s: float
    choose_s: float
    keep_s: float


def measure(num_workers: int, *, num_decisions: int = 300, policy: str = "slo") -> DecisionFigures:
    rng, predictor = random.Random(num_workers), Predictor()
    table = FleetTable(predictor)
    members = [_met(number, num_workers) for number in range(num_workers)]
    for member in members:
        _hear(member, rng)
        table.add(member)
    decide = policy_of(RouterConfig(model_path=Path("none"), model_name="none"), policy)
    spent = [0.0, 0.0, 0.0]
    for number in range(num_decisions):
        for member in rng.choices(members, k=25):
            _hear(member, rng)
        for _ in range(2):
            reader, writer = rng.choice(members[: num_workers // 2]), rng.choice(members[num_workers // 2 :])
            predictor.saw_transfer(reader.worker_id, writer.worker_id, num_bytes=1e8, seconds=0.01, now=float(number))
        times = [time.process_time()]
        candidates = table.candidates(Match({members[0].worker_id: 4}), 2000, BLOCK_SIZE, now=float(number))
        times.append(time.process_time())
        view = RequestView(
            request_id="r", num_tokens=2000, block_size=BLOCK_SIZE, num_decided=number, answer_tokens=200.0,
            block_bytes=2**23, lanes=predictor.lanes,
        )  # fmt: skip
        decision = decide(view, candidates)
        times.append(time.process_time())
        estimate(view, *candidates.pair(decision.prefill, decision.decode))
        kept_candidates(candidates, decision)
        times.append(time.process_time())
        spent = [so_far + after - before for so_far, before, after in zip(spent, times, times[1:], strict=False)]
    offer_s, choose_s, keep_s = (seconds / num_decisions for seconds in spent)
    return DecisionFigures(num_workers=num_workers, offer_s=offer_s, choose_s=choose_s, keep_s=keep_s)


def _met(number: int, num_workers: int) -> Member:
    member = Member(f"worker-{number}", "nowhere:0")
    role = WorkerRole.PREFILL if number < num_workers // 2 else WorkerRole.DECODE
    layout = SimpleNamespace(block_size=BLOCK_SIZE, block_bytes=2**23)
    member.connected(
        cast(Any, SimpleNamespace(role=role, layout=layout, incarnation=1)), cast(Any, SimpleNamespace(lost=False))
    )
    member.enter(WorkerState.READY, now=0.0)
    return member


def _hear(member: Member, rng: random.Random) -> None:
    member.load = WorkerLoad(
        num_running=rng.randrange(20),
        queued_prefill_tokens=rng.randrange(9000),
        num_free_blocks=rng.randrange(6000),
        num_blocks=6668,
        prefill_tokens_per_s=30_000.0 + rng.random(),
        decode_step_s=0.008,
        transfer_bytes=10**9,
        transfer_s=0.03,
    )
    member.changed()


def decisions_bench(
    workers: Annotated[list[int] | None, typer.Option(help="Numbers of workers.")] = None,
    policy: Annotated[str, typer.Option(help="Which policy decides.")] = "slo",
    json_file: JsonFile = None,
) -> None:
    """A Markdown table on stdout."""
    rows = [measure(num_workers, policy=policy) for num_workers in workers or (4, 16, 100, 1000)]
    typer.echo("| workers | candidates | policy | record | together |\n|---|---|---|---|---|")
    for one in rows:
        cells = [f"{seconds * 1e3:.2f} ms" for seconds in (one.offer_s, one.choose_s, one.keep_s)]
        together = one.offer_s + one.choose_s + one.keep_s
        typer.echo(f"| {one.num_workers:,} | {' | '.join(cells)} | {together * 1e3:.2f} ms |")
    write_figures(json_file, policy=policy, figures=[asdict(one) for one in rows])


if __name__ == "__main__":
    typer.run(decisions_bench)
