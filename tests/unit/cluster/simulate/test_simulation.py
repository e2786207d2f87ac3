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

from cluster.simulate.clock import VirtualLoop, run_virtually
from cluster.simulate.lanes import Cards, Lanes
from cluster.simulate.network import Network, Wire
from cluster.simulate.simulation import simulate
from cluster.simulate.worker import SimulatedWorker
from cluster.simulate.workload import GENERATED
from protos.values import Health, ReserveRequest, WorkerRole
from tests.unit.cluster.simulate.towns import sessions, town

ROOT = Path(__file__).resolve().parents[4]

FINGERPRINT = """
from cluster.simulate.simulation import simulate
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
    ("prefill", "decode", "policy", "depth"), [(1, 2, "slo", 1), (0, 2, "prefix_aware", 0), (2, 2, "slo", 0)]
)
def test_leaps_change_no_event(prefill: int, decode: int, policy: str, depth: int) -> None:
    """Whatever the policy learns from: the pace that workers tell of, when tokens came, what caches hold and evict."""
    asked = sessions("conversations", num=40, rate=12.0)
    config = town(prefill=prefill, decode=decode, num_blocks=700, num_gateways=2)
    config = replace(config, router=replace(config.router, policy=policy), spec=replace(config.spec, depth=depth))
    leaping = simulate(replace(config, spec=replace(config.spec, leaping=True)), asked)
    stepping = simulate(config, asked)
    assert leaping.fingerprint == stepping.fingerprint
    assert leaping.records == stepping.records


def test_a_worker_that_keeps_blocks_for_others_is_not_stuck() -> None:
    """The rule of the real engine's loop, `workers.rpc.progress`."""
    spec = replace(town().spec, stall_s=1.0)

    async def wait_for_kv() -> Health:
        network, lanes = Network(Wire(), random.Random(0)), Lanes(Cards())
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


def test_colocated_workers_serve_as_well() -> None:
    config = town()
    config = replace(config, pools=replace(config.pools, prefill=None, decode=None, colocated=2))
    outcome = simulate(config, sessions(num=20))
    assert [record.error for record in outcome.records] == [""] * 20


def test_what_a_gateway_does_for_a_request_comes_before_its_first_token() -> None:
    asked = sessions(num=3, rate=1.0, max_output=40)
    plain, slow = (simulate(town(request_s=request_s), asked) for request_s in (0.0, 0.05))
    for one, other in zip(plain.records, slow.records, strict=True):
        assert one.ttft_s is not None
        assert other.ttft_s == pytest.approx(one.ttft_s + 0.05, abs=0.002)


def test_a_host_tier_finds_more_and_its_loads_take_time_that_leaps_do_not_change() -> None:
    asked = sessions("conversations", num=12)

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
