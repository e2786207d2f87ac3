"""Random clusters in random trouble, each a pure function of its seed: found faults are replayed by giving the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.bench.workload import Lengths
from cluster.config import PoolsConfig, SupervisionConfig
from cluster.simulate.config import SimulationConfig, hardware_spec, read_settings, simulated_router
from cluster.simulate.faults import Fault, drawn
from cluster.simulate.lanes import Cards
from cluster.simulate.network import Wire
from cluster.simulate.simulation import Outcome, simulate
from cluster.simulate.workload import Load, Session, agents, fitting, generated
from router.policies.registry import NAMES

AUDIT_EVERY = 64
MAX_PROMPT = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Everything a run depends on."""

    seed: int
    config: SimulationConfig
    sessions: Sequence[Session]
    faults: Sequence[Fault]

    @property
    def replay(self) -> str:
        return f"baton simulate --replay {self.seed}"


def trial(seed: int) -> Trial:
    """Small memories, few workers, short leases and impatient supervisors: what is rare elsewhere happens here."""
    rng = random.Random(f"{seed} trial")
    config = _config(seed, rng)
    name = rng.choice(("poisson", "bursts", "conversations", "agents", "agents"))
    many_turns = name in ("conversations", "agents")
    load = Load(
        num_requests=rng.choice((6, 12, 24)),
        rate=rng.choice((3.0, 10.0, 40.0)),
        prompts=Lengths(low=1, high=rng.choice((40, MAX_PROMPT // 5 if many_turns else MAX_PROMPT))),
        outputs=Lengths(low=1, high=rng.choice((4, 40))),
        seed=seed,
    )
    room = config.spec.num_blocks * config.spec.layout.block_size
    made = agents(load, num_systems=2, system_tokens=rng.choice((8, 64))) if name == "agents" else generated(name, load)
    sessions = [_hurried(session) for session in made]
    sessions, _ = fitting(sessions, room)
    until_s = max(session.due_s for session in sessions) + 2.0
    workers = [f"{role}-{place}" for role, count in config.pools.counts().items() for place in range(count)]
    faults = drawn(
        rng.choice((0, 2, 5, 10)), seed=seed, workers=workers, num_gateways=config.num_gateways, until_s=until_s,
        with_store=config.shared_index,
    )  # fmt: skip
    return Trial(seed=seed, config=config, sessions=sessions, faults=faults)


def run(seed: int) -> Outcome:
    """Raises AssertionError for a broken invariant."""
    made = trial(seed)
    return simulate(made.config, made.sessions, made.faults)


def reason(error: BaseException) -> str:
    """What broke, without the groups that tasks wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _config(seed: int, rng: random.Random) -> SimulationConfig:
    block_size = rng.choice((4, 16))
    settings = read_settings(None, [f"worker.block_size={block_size}"])
    leaping = random.Random(f"{seed} leaps").random() < 0.5
    spec = hardware_spec(gpu="h100", model="llama-3-8b", tp=1, settings=settings, leaping=leaping)
    spec = replace(
        spec,
        num_blocks=rng.choice((1, 2, 8)) * (2 * MAX_PROMPT) // block_size,
        scheduler=replace(
            spec.scheduler,
            max_num_seqs=rng.choice((2, 16)),
            max_num_batched_tokens=rng.choice((32, 512)),
            prefill_chunk=rng.choice((16, 512)),
        ),
        prefill=replace(spec.prefill, chunk_bytes=rng.choice((1, 2**28))),
        decode=replace(spec.decode, headroom=rng.choice((0.0, 0.1))),
        depth=rng.choice((0, 1)),
        stall_s=10.0,
        thorough=True,
        **_host(random.Random(f"{seed} host")),
    )
    router = simulated_router(
        policy=rng.choice(sorted(NAMES)),
        local_prefill_tokens=rng.choice((0, 32)),
        ticket_lease_s=rng.choice((1.0, 10.0)),
        max_queue_s=120.0,
        max_attempts=20,
    )
    return SimulationConfig(
        pools=_pools(rng),
        spec=spec,
        router=router,
        supervision=SupervisionConfig(health_period_s=1.0, max_misses=2),
        cards=Cards(max_staged_bytes=random.Random(f"{seed} staged").choice((1, 2**28))),
        wire=Wire(jitter_s=rng.choice((0.0, 0.005)), loss=rng.choice((0.0, 0.02))),
        num_gateways=rng.choice((1, 1, 2)),
        shared_index=random.Random(f"{seed} store").random() < 0.25,
        load_s=rng.choice((0.2, 2.0)),
        max_skew_s=1e5,
        audit_every=AUDIT_EVERY,
        patience_s=400.0,
        seed=seed,
    )


def _host(rng: random.Random) -> dict[str, Any]:
    """Half of the clusters keep what they evict, over links that are worth it or are not."""
    return {"host_blocks": rng.choice((0, 0, 8, 300)), "host_bytes_per_s": rng.choice((1e9, 50e9))}


def _pools(rng: random.Random) -> PoolsConfig:
    if rng.random() < 0.2:
        return PoolsConfig(colocated=rng.choice((1, 2)))
    return PoolsConfig(prefill=rng.choice((0, 1, 1, 2)), decode=rng.choice((1, 2, 3)))


def _hurried(session: Session) -> Session:
    """Nobody thinks for long: what happens between turns is not what is looked for."""
    return replace(session, turns=tuple(replace(turn, pause_s=turn.pause_s / 20) for turn in session.turns))
