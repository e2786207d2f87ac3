"""The router's estimates of its workers, before and after their jobs."""

from __future__ import annotations

import pytest

from protos.values import HostLoad, WorkerLoad, WorkerRole
from router.routing.candidate_columns import Line
from router.routing.predictor import LOAD, Predictor
from router.routing.predictor import PREFILL as UNOBSERVED
from router.routing.recent_work import RECENT_EACH, RECENT_S, RecentWork, kept
from tests.unit.router.predicting import predicted

DECODE, PREFILL = WorkerRole.DECODE, WorkerRole.PREFILL
TRUE = Line(fixed_s=0.05, each_s=2e-4)


def test_a_worker_that_nobody_has_measured_counts_as_its_pool() -> None:
    predictor = Predictor()
    for number in range(50):
        predictor.saw_first_token(
            "p0", PREFILL, num_tokens=1000, seconds=2.0, now=float(number)
        )  # fmt: skip
    assert predicted(predictor, "p1", PREFILL, WorkerLoad(), now=50.0).prefill_time(1000) == pytest.approx(2.0, rel=0.2)
    own = WorkerLoad(prefill_tokens_per_s=10_000.0)
    assert predicted(predictor, "p2", PREFILL, own, now=50.0).prefill_time.each_s == pytest.approx(1e-4)
    assert predicted(predictor, "d0", DECODE, WorkerLoad(), now=50.0).prefill_time == UNOBSERVED


@pytest.mark.parametrize(("told", "each_s"), [(9_000.0, 1 / 10_500), (12_000.0, 1 / 10_500), (1_000.0, 1 / 1_000)])
def test_reported_speeds_differ_by_chance_unless_far_apart(told: float, each_s: float) -> None:
    predictor = Predictor()
    others = {9_000.0: (12_000.0,), 12_000.0: (9_000.0,), 1_000.0: (12_000.0, 12_000.0)}[told]
    for number, speed in enumerate(others):
        predicted(predictor, f"p{number}", PREFILL, WorkerLoad(prefill_tokens_per_s=speed), now=0.0)
    known = predicted(predictor, "p", PREFILL, WorkerLoad(prefill_tokens_per_s=told), now=0.0).prefill_time
    assert known.each_s == pytest.approx(each_s)
    new = predicted(predictor, "new", PREFILL, WorkerLoad(), now=0.0).prefill_time
    assert new.each_s == pytest.approx((len(others) + 1) / (sum(others) + told)), "it counts as its pool"


def test_loading_time_follows_the_workers_measurements() -> None:
    predictor = Predictor()
    told = WorkerLoad(host=HostLoad(num_blocks=100, loaded_bytes=4_000_000, load_s=0.5))
    assert predicted(predictor, "p0", PREFILL, told, now=0.0).load_time == Line(each_s=0.5 / 4_000_000)
    for unknown in (WorkerLoad(), WorkerLoad(host=HostLoad(num_blocks=100))):
        assert predicted(predictor, "p0", PREFILL, unknown, now=0.0).load_time == LOAD


def test_a_worker_that_left_is_forgotten_with_its_lanes() -> None:
    predictor = Predictor()
    for worker_id, role in (("p0", PREFILL), ("d0", DECODE)):
        predicted(predictor, worker_id, role, WorkerLoad(), now=0.0)
    predictor.saw_transfer("p0", "d0", num_bytes=1e6, seconds=0.5, now=0.0)
    predictor.saw_answer("d0", DECODE, num_sequences=4, num_tokens=100, seconds=0.03, now=1.0)
    assert {reader: lanes.keys() for reader, lanes in predictor.lanes.items()} == {"p0": {"d0"}}
    assert predictor.errors()["d0"][1].num_observed == 1
    predictor.drop("d0")
    predictor.saw_transfer("p0", "d0", num_bytes=1e6, seconds=0.5, now=2.0)  # what it did is heard after it has left
    predictor.saw_answer("d0", DECODE, num_sequences=4, num_tokens=100, seconds=0.03, now=2.0)
    predictor.saw_first_token("d0", DECODE, num_tokens=4, seconds=0.03, now=2.0)
    assert not predictor.lanes
    assert not predictor.errors()


def test_a_new_worker_has_no_debt_of_past_work() -> None:
    predictor = Predictor()
    for worker_id in ("p0", "p1"):
        predicted(predictor, worker_id, PREFILL, WorkerLoad(), now=0.0)
    for worker_id in ("p0", "p1"):
        predictor.routed(worker_id, PREFILL, 10_000, beside=0, now=0.0)
    recent = [predicted(predictor, name, PREFILL, WorkerLoad(), now=0.0).recent_tokens for name in ("p0", "p1", "p2")]
    assert recent == pytest.approx([10_000, 10_000, 5_000], rel=0.02)
    assert recent[0] / (sum(recent) / 3) == pytest.approx(1.2, rel=0.02)
    later = predicted(predictor, "p0", PREFILL, WorkerLoad(), now=300.0).recent_tokens
    assert later == pytest.approx(recent[0] / 2)


def test_recent_work_fades_with_time_and_with_newer_requests() -> None:
    recent = RecentWork()
    recent.give("c0", 1000, now=0.0)
    recent.give("c1", 0, now=0.0)
    for _ in range(RECENT_EACH):
        recent.give("c1", 0, now=0.0)
        recent.give("c1", 0, now=0.0)
    work, at = recent.of("c0", now=0.0)
    assert work * kept(recent.clock(0.0) - at) == pytest.approx(500, rel=0.02), "a request for each, so many times"
    assert work * kept(recent.clock(RECENT_S) - at) == pytest.approx(250, rel=0.02)


def test_colocated_answers_count_as_work() -> None:
    predictor = Predictor()
    for number in range(40):
        now, sequences = float(number), number % 8 + 1
        for role in (PREFILL, WorkerRole.COLOCATED):
            predictor.saw_first_token("w", role, num_tokens=100 * sequences, seconds=0.01 * sequences, now=now)
            predictor.saw_answer(
                "w", role, num_sequences=sequences, num_tokens=64, seconds=0.01 + 0.001 * sequences, now=now
            )

    def work(role: WorkerRole, beside: int) -> float:
        name = f"{role} {beside}"
        predicted(predictor, name, role, WorkerLoad(), now=40.0)
        before = predicted(predictor, name, role, WorkerLoad(), now=40.0).recent_tokens
        predictor.routed(name, role, 10, beside=beside, now=40.0)
        return predicted(predictor, name, role, WorkerLoad(), now=40.0).recent_tokens - before

    assert work(WorkerRole.COLOCATED, 0) == pytest.approx(10, abs=1)
    slowed = predictor.answer_tokens * 0.001 * 4 / 1e-4  # four others, each a millisecond a token longer
    assert work(WorkerRole.COLOCATED, 4) == pytest.approx(10 + slowed, rel=0.3)
    assert work(PREFILL, 4) == pytest.approx(10, abs=1)


def test_an_idle_worker_is_not_held_to_a_step_it_took_long_ago() -> None:
    predictor = Predictor()
    busy = WorkerLoad(num_running=2, decode_step_s=0.008)
    for number in range(8):
        predicted(predictor, "d1", WorkerRole.DECODE, busy, now=float(number))
        predictor.saw_answer("d1", WorkerRole.DECODE, num_sequences=2, num_tokens=64, seconds=0.008, now=float(number))
    cold = WorkerLoad(decode_step_s=0.035)
    idle = predicted(predictor, "d0", WorkerRole.DECODE, cold, now=8.0)
    assert idle.step_time(1) < 0.012


def test_prefill_steps_do_not_slow_a_colocated_workers_estimate() -> None:
    predictor = Predictor()
    reading = WorkerLoad(num_running=9, decode_step_s=0.13, prefill_tokens_per_s=20_000.0)
    writing = WorkerLoad(num_running=9, decode_step_s=0.02, prefill_tokens_per_s=20_000.0)
    slow = WorkerLoad(num_running=9, decode_step_s=0.05, prefill_tokens_per_s=5_000.0)
    loads = {"c0": reading, "c1": writing, "c2": slow}
    for number in range(8):
        for name, load in loads.items():
            predicted(predictor, name, WorkerRole.COLOCATED, load, now=float(number))
            predictor.saw_answer(
                name,
                WorkerRole.COLOCATED,
                num_sequences=9,
                num_tokens=64,
                seconds=load.decode_step_s,
                now=float(number),
            )
    first, second, third = (
        predicted(predictor, name, WorkerRole.COLOCATED, load, now=8.0).step_time(10) for name, load in loads.items()
    )
    assert first == pytest.approx(second)
    assert third == pytest.approx(3 * first), "one that reads a third as fast as all on average steps a third as fast"


def test_a_reported_speed_is_counted_once() -> None:
    predictor, mean = Predictor(), 1000.0

    def reading_s(slower: float) -> float:
        """The time to read a thousand tokens by the third of three workers."""
        speeds = {"p0": 1.5 * mean - 0.5 * mean / slower, "p1": 1.5 * mean - 0.5 * mean / slower, "p2": mean / slower}
        return [
            predicted(predictor, name, PREFILL, WorkerLoad(prefill_tokens_per_s=speed), now=now).prefill_time(1000)
            for name, speed in speeds.items()
        ][-1]

    now = 0.0
    for _ in range(100):
        now += 1.0
        learned = reading_s(1.9)
        for name, seconds in {"p0": 0.84, "p1": 0.84, "p2": 1.9}.items():
            predictor.saw_first_token(name, PREFILL, num_tokens=1000, seconds=seconds, now=now)
    assert learned == pytest.approx(1.9, rel=0.1)
    for slower in (2.1, 1.9, 2.1, 3.0, 6.0, 2.1, 1.9):
        reading_s(slower)
        assert reading_s(slower) == pytest.approx(slower, rel=0.1)


def test_prefill_of_a_long_prompt_is_no_overhead() -> None:
    predictor, load = Predictor(), WorkerLoad(prefill_tokens_per_s=1e4)
    for now in range(20):
        predicted(predictor, "w0", WorkerRole.COLOCATED, load, now=float(now))
        predictor.saw_first_token(
            "w0", WorkerRole.COLOCATED, num_tokens=60_000, seconds=6.02, now=float(now), on_idle=True
        )
    assert predictor.overhead_s(WorkerRole.COLOCATED, now=20.0) <= 0.02


def test_ttft_overhead_is_learned_and_halves_when_stale() -> None:
    predictor = Predictor()

    def first_token(num_tokens: int, seconds: float, now: float, on_idle: bool = True) -> None:
        predictor.saw_first_token(
            "w0", WorkerRole.COLOCATED, num_tokens=num_tokens, seconds=seconds, now=now, on_idle=on_idle
        )

    for _ in range(600):
        first_token(100, 0.09, now=0.0, on_idle=False)
    assert predictor.overhead_s(WorkerRole.COLOCATED, now=0.0) == 0.0
    predictor = Predictor()
    for number in range(7):
        first_token(number, 0.004 + 0.001 * (number % 2) + 1e-4 * number, now=float(number))
    assert predictor.overhead_s(WorkerRole.COLOCATED, now=7.0) == 0.0
    first_token(10, 3.0, now=8.0)
    first_token(100_000, 9.9, now=8.0)  # a little faster than all of them: nothing came to it
    assert 0.002 < predictor.overhead_s(WorkerRole.COLOCATED, now=9.0) <= 0.004
    assert 0 < predictor.overhead_s(WorkerRole.COLOCATED, now=80.0) <= 0.004
    known_s = predictor.overhead_s(WorkerRole.COLOCATED, now=80.0)
    assert predictor.overhead_s(WorkerRole.COLOCATED, now=200.0) == known_s / 2, "it may be a faster cluster by now"
    first_token(1, 0.0011, now=201.0)
    assert 0.0 < predictor.overhead_s(WorkerRole.COLOCATED, now=202.0) < known_s / 2, "what came sooner was possible"


def test_ttft_overhead_is_forgotten_with_time_and_new_workers() -> None:
    predictor, load = Predictor(), WorkerLoad()

    def overhead_s(now: float) -> float:
        return predictor.overhead_s(PREFILL, now=now)

    def cold_start(now: float) -> None:
        for _ in range(8):
            predictor.saw_first_token("p0", PREFILL, num_tokens=0, seconds=4.0, now=now, on_idle=True)
        assert overhead_s(now) == 4.0

    predicted(predictor, "p0", PREFILL, load, now=0.0)
    began = 1e7  # a machine that has been up for months
    cold_start(began)
    assert [overhead_s(began + s) for s in (119.0, 121.0, 241.0, 481.0)] == [4.0, 2.0, 1.0, 0.25]
    assert overhead_s(began + 86_400.0) < 1e-6
    cold_start(2 * began)
    for name in ("p0", "d0"):
        predicted(predictor, name, PREFILL if name == "p0" else DECODE, load, now=2 * began)
    predictor.drop("d0")
    assert overhead_s(2 * began) == 4.0, "it reads nothing"
    predicted(predictor, "p1", PREFILL, load, now=2 * began)
    assert overhead_s(2 * began) == 0.0
    cold_start(2 * began)
    predictor.drop("p1")
    assert overhead_s(2 * began) == 0.0
