"""The simulation as a whole: every request is answered, twice alike, and leaping changes nothing."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.bench.bench_load import PrefixSpan
from cluster.bench.bench_report import Objective
from cluster.config.cluster_config import PoolsConfig
from cluster.simulate.node.itl import Gaps
from cluster.simulate.node.simulated_worker import SimulatedWorker
from cluster.simulate.results.summary import summarise
from cluster.simulate.run.simulation import simulate
from cluster.simulate.run.simulation_config import simulated_router
from cluster.simulate.world.clock import VirtualLoop, run_virtually
from cluster.simulate.world.faults import Fault
from cluster.simulate.world.network import Network, NetworkModel
from cluster.simulate.world.simulated_lanes import Cards, Lanes
from cluster.simulate.world.simulated_load import GENERATED, SessionTurn, UserSession
from protos.values import Health, ReserveRequest, WorkerRole
from tests.unit.cluster.simulate.towns import run, sessions, town

ROOT = Path(__file__).resolve().parents[5]

FINGERPRINT = """
from cluster.simulate.run.simulation import simulate
from tests.unit.cluster.simulate.towns import sessions, town
print(simulate(town(), sessions("agents", num=12)).fingerprint)
"""


@pytest.mark.parametrize("workload", GENERATED)
def test_every_request_of_every_workload_is_answered_in_full(workload: str) -> None:
    asked = sessions(workload, num=20)
    outcome = simulate(town(num_blocks=20_000), asked)
    assert [record.error for record in outcome.records] == [""] * sum(len(session.turns) for session in asked)


def test_the_same_seed_writes_the_same_events_to_the_byte() -> None:
    lines: dict[str, list[str]] = {"first": [], "second": []}
    outcomes = [simulate(town(), sessions("conversations"), write=written.append) for written in lines.values()]
    assert lines["first"] == lines["second"]
    assert outcomes[0].fingerprint == outcomes[1].fingerprint
    other = simulate(town(), sessions("conversations", seed=1))
    assert other.fingerprint != outcomes[0].fingerprint


def test_the_fingerprint_does_not_depend_on_how_python_hashes() -> None:
    told = [
        subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("prefill", "decode", "policy", "depth", "num_gateways"),
    [(1, 2, "slo", 1, 2), (0, 2, "prefix_aware", 0, 2), (2, 2, "slo", 0, 1), (0, 2, "slo", 1, 1)],
)
def test_leaps_change_no_event(prefill: int, decode: int, policy: str, depth: int, num_gateways: int) -> None:
    """With every policy input that leaps could change, and one or two gateways."""
    asked = sessions("conversations", num=40, rate=12.0)
    config = town(prefill=prefill, decode=decode, num_blocks=700, num_gateways=num_gateways)
    config = replace(config, router=replace(config.router, policy=policy), spec=replace(config.spec, depth=depth))
    leaping = simulate(replace(config, spec=replace(config.spec, leaping=True)), asked)
    stepping = simulate(config, asked)
    assert leaping.fingerprint == stepping.fingerprint
    assert leaping.records == stepping.records


@pytest.mark.parametrize(("policy", "depth", "rate"), [("slo", 0, 20.0), ("prefix_aware", 1, 60.0)])
def test_leaps_change_no_event_among_equal_workers(policy: str, depth: int, rate: float) -> None:
    """A gateway's own jobs count until as many steps have shown them; a worker's first step is no measure."""
    asked = sessions("poisson", num=60, rate=rate, max_output=200)
    config = town(prefill=0, decode=3, num_blocks=20_000)
    config = replace(config, router=replace(config.router, policy=policy), spec=replace(config.spec, depth=depth))
    leaping = simulate(replace(config, spec=replace(config.spec, leaping=True)), asked)
    assert leaping.fingerprint == simulate(config, asked).fingerprint


def test_loaded_blocks_are_intact_with_and_without_leaps() -> None:
    """Clients check every token against all earlier ones."""
    asked = sessions("conversations", num=30, rate=20.0, max_output=40)
    config = town(prefill=0, decode=1, num_blocks=150, audit_every=50)
    config = replace(config, spec=replace(config.spec, host_blocks=2000, host_bytes_per_s=50e9, thorough=True))
    lines: dict[bool, list[str]] = {True: [], False: []}
    leaping, stepping = (
        summarise(
            simulate(replace(config, spec=replace(config.spec, leaping=leaps)), asked, write=written.append),
            Objective(),
        )
        for leaps, written in lines.items()
    )
    assert lines[True] == lines[False]
    assert leaping == stepping, "also the time between tokens"
    assert leaping.report.num_completed == leaping.report.num_requests
    assert leaping.hits.host > 0.05
    assert leaping.hits.device + leaping.hits.host == pytest.approx(leaping.report.cached_share)


def test_prices_and_tiers_count_whole_answers_only() -> None:
    config = town(prefill=0, decode=1, num_blocks=600, usd_per_gpu_hour=2.0)
    config = replace(config, spec=replace(config.spec, host_blocks=2000, host_bytes_per_s=50e9))
    faults = [Fault.parse(f"{at_s} aborts clients by 1") for at_s in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)]
    told = summarise(simulate(config, sessions("agents", num=60, rate=20.0, max_output=80), faults), Objective())
    costs, hits, report = told.costs, told.hits, told.report
    assert report.errors["aborted"] > report.num_completed > 0
    assert hits.host > 0
    assert hits.device + hits.host + hits.pulled == pytest.approx(report.cached_share)
    num_cached = (report.cached_share or 0.0) * report.num_prompt_tokens
    assert costs.per_million_input > costs.per_million_cached > 0
    paid = costs.per_million_input * (report.num_prompt_tokens - num_cached) + costs.per_million_cached * num_cached
    assert (paid + costs.per_million_output * report.num_output_tokens) / 1e6 == pytest.approx(costs.usd)


def test_itl_is_between_tokens_of_one_answer() -> None:
    gaps = Gaps()
    assert gaps.spread() is None
    for job in ("a", "b", "c"):
        gaps.begun(job)
    gaps.made(["a.1", "b.1"], [1.0])
    gaps.made(["a.1"], [1.5, 2.0, 2.5])  # three steps, told at once
    gaps.made(["b.2"], [5.0])  # another attempt of the same job
    gaps.ended("a")
    gaps.made(["a.1"], [90.0, 99.0])  # nobody waits for it any more
    gaps.made(["a.2"], [91.0])
    spread = gaps.spread()
    assert spread is not None
    assert (spread.num, spread.max) == (4, 4.0)
    assert [spread.mean, spread.p50, spread.p99] == pytest.approx([5.5 / 4, 0.5, 0.5])
    for number in range(1000):
        gaps.made(["c.1"], [100.0 + number * number / 2])
    spread = gaps.spread()
    assert spread is not None
    assert spread.p90 == pytest.approx(900, rel=0.01)
    for job in ("b", "c"):
        gaps.ended(job)
    gaps.assert_idle()


def test_the_pause_after_lost_kv_is_a_gap() -> None:
    """The decode worker's failure ended the answer's gaps, though another attempt went on with it: the longest were
    missing."""
    stalled = [Fault.parse("0 lane-stall prefill-0>decode-0 for 9")]
    outcome = simulate(town(prefill=1, decode=1), _of(sessions(num=1), num_output=9), stalled)
    (record,) = outcome.records
    assert outcome.itl_s is not None
    assert outcome.itl_s.num == 8
    assert outcome.itl_s.max > 4
    assert 8 * outcome.itl_s.mean == pytest.approx(record.arrivals_s[-1] - record.arrivals_s[0], abs=0.01)


def test_a_worker_that_keeps_blocks_for_others_is_not_stuck() -> None:
    """The rule of the real engine's loop, `workers.rpc.step_progress`."""
    spec = replace(town().spec, stall_s=1.0)

    async def wait_for_kv() -> Health:
        network, lanes = Network(NetworkModel(), random.Random(0)), Lanes(Cards())
        decode, prefill = (
            SimulatedWorker(spec, worker_id=role, role=role, incarnation=1, network=network, lanes=lanes)
            for role in (WorkerRole.DECODE, WorkerRole.PREFILL)
        )
        asked = ReserveRequest(
            request_id="r", prompt_ids=(1, 2, 3), source=prefill.info.lane, source_layout=spec.layout, lease_s=60.0
        )
        await decode.turns.call(lambda: decode.role.reserve(asked, decode.clock()))
        await asyncio.sleep(5.0)
        return decode.turns.health(decode.clock())

    assert run_virtually(wait_for_kv(), loop=VirtualLoop()).healthy


def test_leaps_save_messages() -> None:
    asked = sessions(num=4, rate=0.5, max_output=800)
    leaping, stepping = (simulate(town(leaping=leaps), asked) for leaps in (True, False))
    assert leaping.num_callbacks < stepping.num_callbacks / 3


def test_a_long_prompts_kv_does_not_wait_for_other_prompts() -> None:
    """4 GB of KV on a lane of 50 GB/s that stages 256 MiB, beside steps of 0.4 s."""
    asked = [
        UserSession(
            number=n, due_s=0.0, turns=(SessionTurn(spans=(PrefixSpan(key=(n, 0), num_tokens=30_000),), num_output=3),)
        )
        for n in range(3)
    ]
    outcome = simulate(town(prefill=1, decode=1, num_blocks=6000), asked)
    for record in outcome.records:
        assert not record.error
        assert record.arrivals_s[-1] - record.arrivals_s[0] < 0.5


def test_colocated_workers_serve_as_well() -> None:
    config = town()
    config = replace(config, pools=replace(config.pools, prefill=None, decode=None, colocated=2))
    outcome = simulate(config, sessions(num=20))
    assert [record.error for record in outcome.records] == [""] * 20


def test_a_host_tier_adds_hits_and_loading_time() -> None:
    asked = sessions("conversations", num=15)

    def outcome(host_blocks: int, *, leaping: bool, speed: float = 25e9) -> tuple[str, int]:
        config = town(num_blocks=64, leaping=leaping, audit_every=100)
        spec = replace(config.spec, host_blocks=host_blocks, host_bytes_per_s=speed)
        told = simulate(replace(config, spec=spec), asked)
        assert {record.error for record in told.records} == {""}
        return told.fingerprint, sum(record.num_cached or 0 for record in told.records)

    without, plain = outcome(0, leaping=True), outcome(4000, leaping=False)
    assert plain[1] > without[1]
    assert outcome(4000, leaping=True) == plain
    assert outcome(4000, leaping=True, speed=1e7) == without, "what is loaded slower than computed is computed"


def test_answers_of_one_token_are_not_handed_over() -> None:
    """The one token is the reader's: what was reserved for the rest is given back. Every such answer counted."""
    short, long = sessions(num=3, max_output=1), sessions(num=9, max_output=20)[3:]
    told = summarise(simulate(town(), [*_of(short, num_output=1), *_of(long, num_output=9)]), Objective())
    assert told.report.num_completed == 9
    assert told.handed_over == pytest.approx(6 / 9)
    begun = simulate(town(), _of(long, num_output=900), [Fault.parse("1.5 aborts clients by 0.5")])
    told = summarise(begun, Objective())
    assert 0 < told.report.num_completed < told.report.num_requests
    assert told.handed_over == 1.0, "of whole answers"


def _of(asked: list[UserSession], *, num_output: int) -> list[UserSession]:
    return [
        replace(query, turns=tuple(replace(turn, num_output=num_output) for turn in query.turns)) for query in asked
    ]


def test_prefixes_are_pulled_over_fast_lanes() -> None:
    """A token's KV is 131 kB, and takes longer at 1 GB/s, as which unmeasured lanes count, than it is to compute."""
    asked = sessions("agents", num=40)

    def pulled(rate: float) -> float:
        config = town(router=simulated_router(policy="round_robin"), cards=Cards(rate=rate))
        return summarise(simulate(config, asked), Objective()).hits.pulled

    assert pulled(1e9) == 0.0 < pulled(50e9)


@pytest.mark.parametrize(("method", "seen"), [("_make_pool", TypeError), ("start", AssertionError)])
def test_a_worker_that_never_starts_ends_the_simulation(
    method: str, seen: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was launched again and again, forever, in no time."""

    def fail(worker: SimulatedWorker) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(SimulatedWorker, method, fail)
    with pytest.raises(seen, match=r"a bug|the supervisor met a fault of our own"):
        simulate(town(), sessions(num=1))


DIES_S, LOADS_S = 1.0, 200.0


def test_answers_wait_minutes_for_a_checkpoint() -> None:
    outcome, _ = run(f"{DIES_S} kill colocated-0", pools=PoolsConfig(colocated=1), load_s=LOADS_S)
    begun = [record for record in outcome.records if record.arrivals_s and record.arrivals_s[0] < LOADS_S + DIES_S]
    resumed = [finding for finding in begun if finding.error or finding.arrivals_s[-1] > LOADS_S + DIES_S]
    assert resumed, "some answers had begun when the only worker died"
    assert not [finding.error for finding in resumed if finding.error]
