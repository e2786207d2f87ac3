"""The share of its capacity that a load asks of each pool, and runs that last until their figures are steady."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from cluster.bench.bench_load import Lengths
from cluster.bench.bench_report import RequestRecord
from cluster.config.cluster_config import PoolsConfig
from cluster.simulate.run.offered import grows, offered, requests_until_steady, work_of_sessions
from cluster.simulate.run.simulation_config import SimulationConfig, hardware_spec
from cluster.simulate.world.clock import VirtualLoop
from cluster.simulate.world.simulated_load import GeneratedLoad, generated
from protos.values import WorkerRole
from tests.unit.cluster.simulate.asking import call

HEAVY = ("workload.input_len=2000", "workload.output_len=20", "workload.rate=60")
"""One prefill worker of the built-in Llama 3 8B reads about 21 such prompts a second."""


def load(rate: float, num_requests: int = 200) -> GeneratedLoad:
    prompts, outputs = Lengths(low=4000, high=4000), Lengths(low=400, high=400)
    return GeneratedLoad(num_requests=num_requests, rate=rate, prompts=prompts, outputs=outputs)


@pytest.mark.parametrize(("num_prefill", "is_enough"), [(13, False), (14, True)])
def test_fifty_prompts_a_second_need_fourteen_workers(num_prefill: int, is_enough: bool) -> None:
    """Llama 3 70B on four H100s takes 0.265 s for 4,000 tokens in full steps: 13 workers read 49 prompts a second."""
    spec = hardware_spec(gpu="h100", model="llama-3-70b", tp=4)
    config = SimulationConfig(pools=PoolsConfig(prefill=num_prefill, decode=7), spec=spec)
    shares = offered(config, work_of_sessions(generated("poisson", load(50.0))), 200 / 50.0)
    assert (shares[WorkerRole.PREFILL] <= 1.0) is is_enough
    assert 0.8 < shares[WorkerRole.DECODE] < 1.0


def test_a_shared_prefix_is_computed_once() -> None:
    work = work_of_sessions(generated("documents", load(1.0, num_requests=400)))
    assert sum(request.num_computed for request in work) == 400 * 4000 + 20 * 32_768


def records(waits_s: list[float]) -> list[RequestRecord]:
    return [
        RequestRecord(index=k, sent_s=float(k), arrivals_s=(k + wait_s,), num_output=1, ended_s=k + wait_s)
        for k, wait_s in enumerate(waits_s)
    ]


def test_only_waits_that_lengthen_grow() -> None:
    assert grows(records([0.1 * k for k in range(300)])), "a queue that lengthens"
    assert not grows(records([0.1 * (300 - k) for k in range(300)])), "caches that warm up"
    assert not grows(records([0.1 * min(k, 100) for k in range(300)])), "a queue that forms at the beginning"
    assert not grows(records([1.0 + 0.5 * (k % 7) for k in range(300)])), "noise"
    assert not grows(records([0.1 * k for k in range(60)])), "too few to say"


def test_a_run_says_which_pool_is_offered_too_much(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    result = call(*HEAVY, "workload.requests=200", "--json", str(file))
    pools = {pool["role"]: pool["offered"] for pool in json.loads(file.read_text())["runs"][0]["figures"]["pools"]}
    assert pools["prefill"] > 2 > 1 > pools["decode"]
    assert "not steady" in result.stdout


def test_a_sweep_tries_no_cluster_that_arithmetic_rules_out(tmp_path: Path) -> None:
    """With few requests such a cluster met its objective, and was named as the cheapest."""
    file = tmp_path / "sweep.json"
    sweep = *HEAVY, "workload.requests=60", "cluster.prefill=1:4", "objectives.targets=['ttft p50 < 90 s']"
    result = call(*sweep, "--json", str(file))
    assert result.exit_code == 0, result.output
    swept = json.loads(file.read_text())
    assert [row["cluster"]["prefill"] for row in swept["overloaded"]] == [1, 2]
    assert all(row["offered"]["prefill"] > 1 for row in swept["overloaded"])
    assert swept["cheapest"]["prefill"] == 3
    alone = call(*HEAVY, "objectives.targets=['ttft p50 < 90 s']")
    assert alone.exit_code == 1, "no cluster is left"


def test_a_nearly_full_pool_needs_a_longer_load() -> None:
    assert requests_until_steady(0.5) < 100
    assert 4_000 < requests_until_steady(0.95) < 5_000


def test_a_load_without_a_number_runs_until_steady(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.simulate.world.simulated_load.USUAL_REQUESTS", 100)
    file = tmp_path / "run.json"
    load = "cluster.colocated=1", "workload.input_len=2000", "workload.output_len=1", "workload.rate=18.4"
    call(*load, "--json", str(file))
    (run,) = json.loads(file.read_text())["runs"]
    (pool,) = run["figures"]["pools"]
    assert run["figures"]["report"]["num_requests"] >= requests_until_steady(pool["offered"]) > 100
    assert not run["figures"]["grew"]
    short = call(*load, "workload.requests=100")
    assert "not steady" in short.stdout
    assert "workload.requests" in short.stdout


def test_ctrl_c_in_a_destructor_ends_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops an exception that comes up in a destructor: the sweep went on."""

    class Late:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    close, loops = VirtualLoop.close, list[VirtualLoop]()

    def close_late(loop: VirtualLoop) -> None:
        close(loop)
        loops.append(loop)
        if len(loops) == 2:
            late = Late()
            del late

    monkeypatch.setattr(VirtualLoop, "close", close_late)
    result = call("workload.requests=5", "workload.rate=1", "cluster.colocated=1:5", "objectives.ttft_ms=90000")
    assert result.exit_code == 130
    assert "1 of 5 clusters done" in result.stderr
    assert "1 colocated" in result.stdout
    assert "Traceback" not in result.stderr
