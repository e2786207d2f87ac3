"""Random resizes and flips of a simulated cluster under load: `python -m benchmarks.capacity.simulated_changes`.

Every request must end once, with exactly its tokens, and nothing may be left behind: the simulator's clients and
invariants check that after every event. A change may replace the one before it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from cluster.bench.bench_load import Lengths
from cluster.capacity.controller import FleetController
from cluster.config.cluster_config import PoolsConfig, SupervisionConfig
from cluster.simulate.run.deployment import SimulatedDeployment
from cluster.simulate.run.simulation import SimulationOutcome, Steer, simulate
from cluster.simulate.run.simulation_config import SimulationConfig, hardware_spec, read_settings, simulated_router
from cluster.simulate.world.simulated_load import GeneratedLoad, UserSession, generated
from protos.errors import InvalidRequest
from protos.values import WorkerRole
from router.fleet_owner import DesiredFleet, FleetChange, FleetOrder, OrderKind

MOST = {WorkerRole.PREFILL: 3, WorkerRole.DECODE: 4}


def random_changes(seed: int, num_changes: int, period_s: float, made: list[FleetChange]) -> Steer:
    """As many changes, one after another at random times; `made` gets them with their outcomes."""

    async def steer(deployment: SimulatedDeployment) -> None:
        rng = random.Random(f"{seed} changes")
        configured = DesiredFleet(counts=dict(deployment.config.pools.counts()))
        owner = FleetController(deployment, configured, wall_clock=asyncio.get_running_loop().time)
        numbers: list[int] = []
        try:
            while len(numbers) < num_changes:
                await asyncio.sleep(rng.expovariate(1 / period_s))
                try:
                    change = await owner.order(_order(rng, deployment))
                except InvalidRequest:  # the only decode worker
                    continue
                if change.number:
                    numbers.append(change.number)
                    made[:] = [*(one for one in made if one.number < owner.changes[0].number), *owner.changes]
            made[-1] = await owner.ended(numbers[-1])
        finally:
            made[:] = [*(one for one in made if one.number < owner.changes[0].number), *owner.changes]

    return steer


def _order(rng: random.Random, deployment: SimulatedDeployment) -> FleetOrder:
    if rng.random() < 0.5:
        worker_id, role = rng.choice(sorted(deployment.roles().items()))
        other = WorkerRole.DECODE if role is WorkerRole.PREFILL else WorkerRole.PREFILL
        return FleetOrder(kind=OrderKind.FLIP, worker_id=worker_id, role=other)
    counts = {role: rng.randint(int(role is WorkerRole.DECODE), most) for role, most in MOST.items()}
    return FleetOrder(kind=OrderKind.SCALE, counts=counts)


def config_of(seed: int) -> SimulationConfig:
    rng = random.Random(f"{seed} cluster")
    settings = read_settings("worker.block_size=16")
    spec = hardware_spec(gpu="h100", model="llama-3-8b", tp=1, settings=settings, leaping=rng.random() < 0.5)
    return SimulationConfig(
        pools=PoolsConfig(prefill=1, decode=2),
        spec=replace(spec, num_blocks=rng.choice((300, 2000)), thorough=True),
        router=simulated_router(local_prefill_tokens=32),
        supervision=SupervisionConfig(health_period_s=2.0, grace_s=30.0),
        load_s=rng.choice((0.2, 2.0)),
        num_gateways=rng.choice((1, 2)),
        audit_every=64,
        seed=seed,
    )


def load_of(seed: int, num_changes: int, period_s: float) -> Sequence[UserSession]:
    """Requests until some time after the last change."""
    rate = 12.0
    load = GeneratedLoad(
        num_requests=int(rate * (num_changes * period_s * 1.3 + 5.0)), rate=rate, prompts=Lengths(low=20, high=600),
        outputs=Lengths(low=2, high=120), seed=seed,
    )  # fmt: skip
    return generated("poisson", load)


def run(seed: int, num_changes: int, period_s: float = 0.7) -> tuple[SimulationOutcome, list[FleetChange]]:
    """Raises AssertionError for a request that failed, or anything that is left behind."""
    made: list[FleetChange] = []
    config, sessions = config_of(seed), load_of(seed, num_changes, period_s)
    outcome = simulate(config, sessions, steer=random_changes(seed, num_changes, period_s, made))
    for record in outcome.records:
        assert not record.error, f"request {record.index} ended with {record.error}"
    assert len(outcome.records) == len(sessions)
    assert len(made) >= num_changes, f"the load was over after {len(made)} changes"
    return outcome, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    chosen = parser.parse_args()
    for seed in range(chosen.seeds):
        outcome, made = run(seed, chosen.changes)
        kinds = Counter(f"{change.kind} {change.state}" for change in made)
        sys.stdout.write(
            f"seed {seed}: {len(outcome.records)} requests, 0 errors, {len(made)} changes "
            f"({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}), "
            f"{len(outcome.failures)} attempts repeated\n"
        )


if __name__ == "__main__":
    main()
