"""Random clusters in random trouble; and proof that trouble is had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.simulate.run import soak_trial
from cluster.simulate.run.deployment import SimulatedDeployment
from cluster.simulate.run.simulation import SimulationOutcome, simulate
from cluster.simulate.world.clock import VirtualLoop, run_virtually, running_loop
from cluster.simulate.world.event_log import SimulationLog
from cluster.simulate.world.faults import Fault, Kind, drawn
from cluster.simulate.world.network import NetworkModel
from protos.errors import Misconfigured
from protos.values import SequenceUpdate, WorkerRole
from router.prefix.redis_index import RedisFeed
from tests.unit.cluster.simulate.towns import run, town
from workers.engine.engine import Engine

SEEDS_A_TEST = 12
NUM_TESTS = 8


@pytest.mark.parametrize("first", range(0, SEEDS_A_TEST * NUM_TESTS, SEEDS_A_TEST))
def test_no_invariant_breaks_whatever_happens(first: int) -> None:
    """The trials of `baton simulate --soak 96`; `--replay SEED` shows one."""
    for seed in range(first, first + SEEDS_A_TEST):
        try:
            soak_trial.run(soak_trial.trial(seed))
        except (AssertionError, BaseExceptionGroup) as error:
            pytest.fail(f"--replay {seed}: {soak_trial.reason(error)}")


def leapt_and_stepped(made: soak_trial.SoakTrial) -> list[SimulationOutcome]:
    config = replace(made.config, wire=NetworkModel(), audit_every=0)
    spec = replace(config.spec, drafter=None)  # steps that verify drafts are not leapt over
    return [
        simulate(replace(config, spec=replace(spec, leaping=leaps)), made.sessions, made.faults)
        for leaps in (True, False)
    ]


@pytest.mark.parametrize("seed", [2, 13, 16, 73, 203])
def test_leaps_change_no_event_in_trouble_either(seed: int) -> None:
    """Seed 13 leaps straight from the last chunk of a prompt and lands twice; in 73 a ticket has ended that a request
    comes with, while nothing else is there to do; in 203 two gateways ask again at one instant, at which single steps
    also have idle workers' ticks."""
    made = soak_trial.trial(seed)
    assert made.faults
    leaping, stepping = leapt_and_stepped(made)
    assert leaping.fingerprint == stepping.fingerprint
    assert leaping.num_callbacks < stepping.num_callbacks


@pytest.fixture
def leaps_of_preempted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests that leapt after a preemption. Without any, the seed has lost its situation."""
    advance, names = Engine.advance, list[str]()

    def watched(engine: Engine, now: float, num_steps: int = 1) -> list[SequenceUpdate]:
        if num_steps > 1:
            names.extend(request.request_id for request in engine.scheduler.running if request.num_preemptions)
        return advance(engine, now, num_steps)

    monkeypatch.setattr(Engine, "advance", watched)
    return names


def test_a_leap_continues_from_the_last_sampled_token(leaps_of_preempted: list[str]) -> None:
    leaping, stepping = leapt_and_stepped(soak_trial.trial(43))
    assert leaping.fingerprint == stepping.fingerprint
    assert leaps_of_preempted


@pytest.mark.parametrize("seed", [1335])
def test_an_answer_leaps_after_a_preemption(seed: int, leaps_of_preempted: list[str]) -> None:
    soak_trial.run(soak_trial.trial(seed))
    assert leaps_of_preempted


def test_a_seed_is_all_there_is_to_a_trial() -> None:
    assert soak_trial.trial(7) == soak_trial.trial(7)
    assert soak_trial.run(soak_trial.trial(7)).fingerprint == soak_trial.run(soak_trial.trial(7)).fingerprint


def answered(outcome: SimulationOutcome) -> int:
    return sum(not record.error for record in outcome.records)


@pytest.mark.parametrize(
    "fault",
    [
        "0.5 kill decode-0", "0.5 kill prefill-1", "0.5 pause decode-1 for 4", "0.5 slow prefill-0 for 3 by 20",
        "0.5 reset decode-0", "0.1 lane-stall prefill-0>decode-0 for 40", "0.5 lane-cut prefill-0>decode-1",
        "0.1 lane-slow prefill-1>decode-0 for 3 by 1000", "0.1 events-drop decode-0 for 2",
        "0.1 events-delay prefill-0 for 2", "0.1 events-double prefill-0 for 2", "0.1 events-swap decode-0 for 2",
        "0.5 index-lost 0", "0.5 drain decode-0", "0.5 drain prefill-0", "0.5 clock-skew decode-0 by 100",
        "0.1 clock-skew prefill-0 by 5", "0.5 store-away redis for 3", "0.2 store-lost redis for 2",
    ],
)  # fmt: skip
def test_every_request_survives(fault: str) -> None:
    outcome, lines = run(fault, shared_index="store" in fault)
    assert answered(outcome) == 25
    assert any(" fault " in line for line in lines)


def test_gateways_report_a_lost_store_and_share_again() -> None:
    config = town(prefill=0, decode=1, num_gateways=2, shared_index=True)

    async def troubles() -> list[set[str]]:
        deployment = SimulatedDeployment(config, SimulationLog(running_loop()))
        await deployment.start()
        shared = [gateway.feed for gateway in deployment.gateways if isinstance(gateway.feed, RedisFeed)]
        store = deployment.store
        assert store is not None
        told: list[set[str]] = []
        changes: list[Callable[[], None]] = [lambda: None, store.disconnect, store.clear, store.reconnect]
        for change in changes:
            change()
            await asyncio.sleep(8.0)
            told.append({outcome.trouble for outcome in shared})
        assert [outcome.num_outages for outcome in shared] == [1, 1]
        assert sum(outcome.writes_for("decode-0") for outcome in shared) == 1, "one of the two has the lease anew"
        deployment.assert_no_faults()
        await deployment.stop()
        return told

    before, away, empty, back = run_virtually(troubles(), loop=VirtualLoop())
    assert before == back == {""}
    assert away == empty
    assert "cannot be reached" in away.pop()


def test_a_killed_worker_is_started_again_and_its_answers_go_on() -> None:
    _, lines = run("0.2 kill decode-0")
    assert sum(" worker serves decode-0 " in line for line in lines) == 2
    assert any(" ended " in line and ">decode-0," in line for line in lines), "nothing has moved on"


def test_clients_of_a_lost_gateway_get_errors_and_hold_nothing() -> None:
    outcome, _ = run("0.5 gateway-restart 0")
    errors = {record.error for record in outcome.records}
    assert errors == {"", "gateway_lost"}


def test_aborted_requests_leave_nothing_behind() -> None:
    outcome, _ = run("0.5 aborts clients by 1.0")
    assert {record.error for record in outcome.records} == {"", "aborted"}


def test_a_fault_that_is_written_down_can_be_read() -> None:
    faults = drawn(200, seed=1, workers=("prefill-0", "decode-0"), num_gateways=2, until_s=10.0, with_store=True)
    assert [Fault.parse(str(fault)) for fault in faults] == faults
    assert {fault.kind for fault in faults} == set(Kind)


@pytest.mark.parametrize(
    "text",
    [
        "kill decode-0", "1.2.3 kill decode-0", "1 melt decode-0", "1 kill", "1 kill decode-0 with 3",
        "1 pause decode-0 for 3 for 4", "1 pause decode-0 for long", "1 pause decode-0 for",
        "1 pause decode-0 for 99999999", "1 aborts clients by 7", "1 slow decode-0 for 3 by 0", "1 slow decode-0 for 0",
        "1 kill decode-0 by 5", "1 drain decode-0 for 5",
    ],
)  # fmt: skip
def test_a_fault_that_cannot_be_read_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(Misconfigured, match="AT KIND TARGET") as refusal:
        Fault.parse(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize("kind", ["slow prefill-0", "lane-stall prefill-0>decode-0", "events-drop decode-0"])
def test_a_week_long_fault_ends_soon_after_the_load(kind: str) -> None:
    outcome, _ = run(f"0.5 {kind} for 1000000", audit_every=0)
    assert {record.error for record in outcome.records} == {""}
    assert outcome.duration_s < 200


def test_a_pool_without_workers_uses_no_memory() -> None:
    outcome, _ = run("0.5 kill decode-0", "0.5 kill decode-1", audit_every=0)
    alone = [sample for sample in outcome.samples if sample.role is WorkerRole.DECODE and not sample.num_workers]
    assert alone, "it is started again at once: nothing was looked at"
    assert {sample.blocks_used for sample in alone} == {0.0}


def test_the_report_lists_faults_by_the_event_logs_clock() -> None:
    """The load, and everybody's clock, begins at 0: workers have started before."""
    outcome, lines = run("0.5 kill decode-0", "0.75 pause decode-0 for 2", "1 aborts clients by 0.1")
    assert [fault.at_s for fault in outcome.faults] == pytest.approx([0.5, 0.75, 1.0])
    assert [(fault.what, fault.why) for fault in outcome.faults] == [
        ("kill decode-0", ""), ("pause decode-0 for 2", "its target did not exist"), ("aborts clients by 0.1", ""),
    ]  # fmt: skip
    noted = [line.split() for line in lines if " fault " in line]
    assert [(line[0], line[-1]) for line in noted] == [
        ("0.500000000", "what=kill"), ("0.750000000", "what=pause"), ("1.000000000", "what=aborts"),
    ]  # fmt: skip
    assert lines[0].startswith("-"), "the workers' start"


def test_a_fault_long_after_the_last_answer_is_passed_over() -> None:
    """A simulation ends when all has been answered, and does not wait for years."""
    outcome, lines = run("0.5 kill decode-0", "1000000000 kill decode-0")
    assert [(fault.at_s, fault.passed_over) for fault in outcome.faults] == [(0.5, False), (1e9, True)]
    assert outcome.faults[-1].why == "it begins after the load was over"
    assert float(lines[-1].split()[0]) < 1000


@pytest.mark.parametrize(
    ("fault", "there_is"),
    [
        ("1 kill decode-7", "decode-0"),
        ("1 kill prefill-0>decode-0", "decode-0"),
        ("1 lane-cut decode-0", "decode-0>decode-1"),
        ("1 lane-cut decode-0>decode-0", "decode-0>decode-1"),
        ("1 gateway-restart 3", "of 0"),
        ("1 aborts decode-0", "clients"),
        ("1 store-lost redis", "settings.index"),
    ],
)
def test_a_fault_of_an_unknown_target_is_refused(fault: str, there_is: str) -> None:
    with pytest.raises(Misconfigured) as refusal:
        run(fault)
    assert fault in str(refusal.value)
    assert there_is in str(refusal.value)


def test_a_worker_drained_during_a_long_step_ends() -> None:
    """Who told it has given up waiting by then."""
    outcome, lines = run("0.4 slow decode-0 for 8 by 600", "0.45 drain decode-0")
    assert any("drain not confirmed" in line for line in lines)
    assert answered(outcome) == 25
