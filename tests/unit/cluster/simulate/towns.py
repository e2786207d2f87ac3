"""Small simulated clusters for tests: toy sizes, so that every part of a request's life happens within milliseconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.bench.bench_load import Lengths
from cluster.config.cluster_config import PoolsConfig, SupervisionConfig
from cluster.simulate.run.simulation import SimulationOutcome, simulate
from cluster.simulate.run.simulation_config import SimulationConfig, hardware_spec, read_settings, simulated_router
from cluster.simulate.world.faults import Fault
from cluster.simulate.world.simulated_load import GeneratedLoad, UserSession, generated

BLOCK_SIZE = 16


def town(
    *, prefill: int = 2, decode: int = 2, leaping: bool = False, num_blocks: int = 2000, seed: int = 0, **more: Any
) -> SimulationConfig:
    """Workers as fast as an H100 with an 8B model, with little memory and short blocks."""
    settings = read_settings(f"worker.block_size={BLOCK_SIZE}")
    spec = hardware_spec(gpu="h100", model="llama-3-8b", tp=1, settings=settings, leaping=leaping)
    config = SimulationConfig(
        pools=PoolsConfig(prefill=prefill, decode=decode),
        spec=replace(spec, num_blocks=num_blocks),
        router=simulated_router(local_prefill_tokens=32),
        supervision=SupervisionConfig(health_period_s=2.0),
        load_s=1.0,
        seed=seed,
    )
    return replace(config, **more)


def sessions(
    name: str = "poisson", *, num: int = 40, rate: float = 10.0, seed: int = 0, max_output: int = 80
) -> list[UserSession]:
    load = GeneratedLoad(
        num_requests=num,
        rate=rate,
        prompts=Lengths(low=20, high=600),
        outputs=Lengths(low=max_output // 40, high=max_output),
        seed=seed,
    )
    return generated(name, load)


def run(*faults: str, workload: str = "poisson", **more: Any) -> tuple[SimulationOutcome, list[str]]:
    """The fates of 25 requests within a second or two, and the event log."""
    lines: list[str] = []
    asked = sessions(workload, num=25, rate=20.0)
    outcome = simulate(
        town(**{"audit_every": 20, **more}), asked, [Fault.parse(text) for text in faults], write=lines.append
    )
    return outcome, lines
