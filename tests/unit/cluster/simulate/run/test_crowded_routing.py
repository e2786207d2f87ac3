"""The default policy where decode workers are full: requests are refused, tried again, and keep their prefix."""

from __future__ import annotations

from dataclasses import replace

from cluster.bench.bench_load import Lengths
from cluster.bench.bench_report import Objective, Report
from cluster.config.cluster_config import PoolsConfig
from cluster.simulate.results.summary import summarise
from cluster.simulate.run.simulation import simulate
from cluster.simulate.run.simulation_config import SimulationConfig, hardware_spec, simulated_router
from cluster.simulate.world.simulated_load import GeneratedLoad, conversations


def crowded(policy: str) -> Report:
    """Conversations come faster than three decode workers have blocks for them."""
    spec = replace(hardware_spec(gpu="h100", model="llama-3-8b", tp=1), num_blocks=600)
    pools = PoolsConfig(prefill=3, decode=3)
    config = SimulationConfig(pools=pools, spec=spec, router=simulated_router(policy), load_s=1.0)
    prompts, outputs = Lengths(low=500, high=6000), Lengths(low=100, high=300)
    load = GeneratedLoad(num_requests=200, rate=60.0, prompts=prompts, outputs=outputs)
    return summarise(simulate(config, conversations(load, pause_s=2.0)), Objective(ttft_s=1.0)).report


def test_full_decode_workers_cost_slo_no_hits() -> None:
    ours, other = crowded("slo"), crowded("prefix_aware")
    assert ours.num_completed == other.num_completed == 200
    assert (ours.cached_share or 0.0) >= 0.95 * (other.cached_share or 1.0)
    assert (ours.cached_share or 0.0) >= 0.32  # 0.31 where a refusal kept requests from the reader with their prefix
    assert ours.ttft_s is not None
    assert other.ttft_s is not None
    assert ours.ttft_s.mean <= 1.05 * other.ttft_s.mean
    assert ours.ttft_s.p99 <= 1.05 * other.ttft_s.p99
