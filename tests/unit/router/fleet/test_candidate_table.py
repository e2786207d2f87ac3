"""The columns of policies follow every change of the fleet and equal those computed anew for each worker."""

from __future__ import annotations

import random
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from protos.values import WorkerLoad, WorkerRole
from router.fleet.candidate_table import FleetTable
from router.fleet.member import Member, WorkerState
from router.prefix.index import NO_MATCH, Match
from router.routing.candidate_columns import Candidate, CandidateTable, Line
from router.routing.decision import Decision, RequestView
from router.routing.pair import MAX_SCORES, ShortRemainder, kept_candidates, pair
from router.routing.predictor import Predictor
from router.routing.slo import Objectives, decode_rank, prefill_rank
from tests.unit.router.predicting import predicted

ROLES = tuple(WorkerRole)
SIZE = 16


def met(worker_id: str, role: WorkerRole) -> Member:
    member = Member(worker_id, "host:1")
    member.client = SimpleNamespace(lost=False)  # type: ignore[assignment]
    member.info = SimpleNamespace(role=role, layout=SimpleNamespace(block_size=SIZE, block_bytes=64))  # type: ignore[assignment]
    member.enter(WorkerState.READY, now=0.0)
    return member


def some_load(rng: random.Random, step: int) -> WorkerLoad:
    return WorkerLoad(
        step=step,
        num_running=rng.randrange(3),
        num_waiting=rng.randrange(3),
        queued_prefill_tokens=rng.randrange(900),
        num_free_blocks=rng.randrange(100),
        num_blocks=100,
        prefill_tokens_per_s=rng.choice((0.0, 4000.0, 5000.0)),
        decode_step_s=rng.choice((0.0, 0.02, 0.03)),
        transfer_bytes=(moved := rng.choice((0, 10**6))),
        transfer_s=0.001 if moved else 0.0,
    )


def observe(predictor: Predictor, members: list[Member], rng: random.Random, now: float) -> None:
    first, other = rng.choice(members), rng.choice(members)
    assert first.role is not None
    predictor.routed(first.worker_id, first.role, rng.randrange(2000), beside=rng.randrange(9), now=now)
    seen: dict[str, Any] = {"seconds": rng.random(), "now": now}
    predictor.saw_first_token(first.worker_id, first.role, num_tokens=rng.randrange(1, 2000), **seen)
    predictor.saw_answer(first.worker_id, first.role, num_sequences=2, num_tokens=20, **seen)
    predictor.saw_transfer(first.worker_id, other.worker_id, num_bytes=1e6, **seen)


@pytest.mark.parametrize("count", [5, 12])
def test_columns_equal_values_computed_worker_by_worker(count: int) -> None:
    """Plays one story for all workers together, and for each alone."""
    rng = random.Random(7)
    together, alone = Predictor(), Predictor()
    offers = FleetTable(together)
    members = [met(f"w{number}", ROLES[number % 3]) for number in range(count)]
    for member in members:
        offers.add(member)
    for step in range(60):
        now = step * 0.5
        member = rng.choice(members)
        member.load = some_load(rng, step)
        member.changed()
        member.route(f"r{step}", num_tokens=100, num_blocks=7)
        offered = offers.candidates(Match({"w1": 3, "w2": 2}, {"w2": 1}), 40, SIZE, now=now)
        for _ in range(2):  # what one worker says of its speed is known of all others the second time
            expected = {
                member.worker_id: predicted(alone, member.worker_id, member.role, member.load, now=now)
                for member in members
                if member.role
            }
        assert offered.workers.worker_ids == tuple(expected)
        for candidate, one in zip(offered, members, strict=True):
            about = expected[candidate.worker_id]
            assert (candidate.prefill_time, candidate.step_time) == (about.prefill_time, about.step_time)
            assert candidate.transfer_time == about.transfer_time
            assert candidate.recent_tokens == about.recent_tokens
            assert candidate.queued_prefill_tokens == one.load_row().queued_prefill_tokens
            assert (
                CandidateTable.of([candidate]).values[:, 0].tolist() == offered.values[:, members.index(one)].tolist()
            )
        assert [output.num_cached_tokens for output in islice(offered, 3)] == [0, 39, 32]
        assert [one.num_host_tokens for one in islice(offered, 3)] == [0, 0, 16]
        for predictor in (together, alone):
            observe(predictor, members, random.Random(step), now)


def test_only_trusted_workers_that_take_work_are_offered() -> None:
    offers = FleetTable(Predictor())
    members = [met("p0", WorkerRole.PREFILL), met("d0", WorkerRole.DECODE), met("d1", WorkerRole.DECODE)]
    for member in members:
        offers.add(member)

    def names(now: float = 0.0) -> tuple[str, ...]:
        return offers.candidates(NO_MATCH, 10, SIZE, now=now).workers.worker_ids

    assert names() == ("p0", "d0", "d1")
    for member in members[:2]:
        while not member.breaker.failed(0.0):
            pass
        offers.doubt(member)
    assert names(0.1) == ("p0", "d1"), "a pool's last is offered whatever it does"
    assert names(60.0) == ("p0", "d0", "d1")
    members[2].enter(WorkerState.DRAINING, now=0.0)
    members[1].disconnected()
    assert names(60.0) == ("p0",)
    offers.remove(members[0])
    assert names(60.0) == ()


def test_a_worker_returning_with_another_role_is_offered_in_it() -> None:
    """Also when nobody asked in between: an idle gateway does not look."""
    offers = FleetTable(Predictor())
    first, other = met("w0", WorkerRole.PREFILL), met("w1", WorkerRole.DECODE)
    for member in (first, other):
        offers.add(member)
    assert offers.candidates(NO_MATCH, 10, SIZE, now=0.0).workers.roles == (WorkerRole.PREFILL, WorkerRole.DECODE)
    first.disconnected()
    first.info, first.client = met("w0", WorkerRole.COLOCATED).info, other.client
    first.changed()
    assert offers.candidates(NO_MATCH, 10, SIZE, now=1.0).workers.roles == (WorkerRole.COLOCATED, WorkerRole.DECODE)


@pytest.mark.parametrize("count", [10, 100])
def test_a_large_table_keeps_the_relevant_candidates(count: int) -> None:
    def worker(number: int, kind: WorkerRole, **kwargs: Any) -> Candidate:
        line = Line(fixed_s=0.01 * (number + 1), each_s=1e-4)
        fields: dict[str, Any] = {
            "prefill_time": line,
            "step_time": line,
            "num_free_blocks": 99,
        } | kwargs
        return Candidate(worker_id=f"{kind[0]}{number}", role=kind, num_blocks=99, **fields)

    last = count - 1
    candidates = CandidateTable.of(
        [
            *(worker(n, WorkerRole.PREFILL, num_cached_tokens=500 * (n == last)) for n in range(count)),
            *(worker(n, WorkerRole.DECODE) for n in range(count)),
        ]
    )
    objectives = Objectives(ttft_s=1.0, tpot_s=0.05)
    short = ShortRemainder(max_tokens=0, max_share=0.0)
    policy = pair("slo", prefill=prefill_rank(objectives), decode=decode_rank(objectives), short=short)
    decision: Decision = policy(RequestView(request_id="r", num_tokens=900, block_size=SIZE), candidates)
    names = {candidate.worker_id for candidate in kept_candidates(candidates, decision)}
    assert {decision.prefill, decision.decode, f"p{last}"} <= names
    assert len(names) == len(candidates) if count <= MAX_SCORES else len(names) <= 2 * MAX_SCORES + 2
    lowest = min(decision.scores[: len(decision.scores) // 2], key=lambda one: one.total)
    assert lowest.worker_id == decision.prefill


def test_block_sizes_are_those_of_present_workers() -> None:
    offers = FleetTable(Predictor())
    members = [met("w0", WorkerRole.COLOCATED), met("w1", WorkerRole.COLOCATED)]
    for member in members:
        offers.add(member)
    assert tuple(offers.block_sizes) == (SIZE,)
    for member, size in zip(members, (32, 64), strict=True):
        member.info = SimpleNamespace(  # type: ignore[assignment]
            role=WorkerRole.COLOCATED, layout=SimpleNamespace(block_size=size, block_bytes=64)
        )
        member.changed()
    assert tuple(offers.block_sizes) == (32, 64)


@pytest.mark.parametrize("num_writers", [1, 9])
def test_a_speed_that_others_make_a_difference_is_counted_once(num_writers: int) -> None:
    """The worker reports nothing new and does nothing."""
    offers, now = FleetTable(predictor := Predictor()), 0.0
    readers = [met(f"p{number}", WorkerRole.PREFILL) for number in range(3)]
    for member in (*readers, *(met(f"d{number}", WorkerRole.DECODE) for number in range(num_writers))):
        offers.add(member)

    def tell(*speeds: float) -> None:
        for member, speed in zip(readers, speeds, strict=False):
            member.load = WorkerLoad(prefill_tokens_per_s=speed)
            member.changed()

    def reading_s() -> float:
        return offers.candidates(NO_MATCH, 1000, SIZE, now=now).candidate("p2").prefill_time(1000)

    for _ in range(100):
        now += 1.0
        tell(1237.0, 1237.0, 526.0)  # of which the last is 1.9 times slower than the mean, and takes as long
        reading_s()
        for member, seconds in zip(readers, (0.84, 0.84, 1.9), strict=True):
            predictor.saw_first_token(member.worker_id, WorkerRole.PREFILL, num_tokens=1000, seconds=seconds, now=now)
    for speed in (1237.0, 1484.0, 1237.0, 1484.0):  # it is 2.2 times slower, and no more, and again
        tell(speed, speed)
        assert reading_s() == pytest.approx(1.95, rel=0.1)
