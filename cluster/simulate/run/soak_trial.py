"""Random clusters with random faults, each a pure function of its seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.bench.bench_load import Lengths
from cluster.config.cluster_config import PoolsConfig, SupervisionConfig
from cluster.simulate.latency.gpus_and_models import gpu_of
from cluster.simulate.latency.rough import Rough
from cluster.simulate.node.simulated_drafts import SimulatedDrafter
from cluster.simulate.run.clients import ABORTED, GATEWAY_LOST, Failure
from cluster.simulate.run.simulation import SimulationOutcome, simulate
from cluster.simulate.run.simulation_config import (
    SimulationConfig,
    gateways_text,
    hardware_spec,
    read_settings,
    simulated_router,
)
from cluster.simulate.world.faults import CLIENTS, OF_LANES, OF_WORKERS, Fault, Kind, drawn
from cluster.simulate.world.faults import LASTING as LASTING_FAULTS
from cluster.simulate.world.network import NetworkModel
from cluster.simulate.world.simulated_lanes import Cards
from cluster.simulate.world.simulated_load import GENERATED, GeneratedLoad, SessionLimit, UserSession, agents, fitting
from protos.errors import InvalidRequest, NoWorkers, Overloaded, RequestKillsWorkers
from protos.values import LATENT, KVLayout, WorkerRole
from router.router_config import AdmissionConfig, DispatchConfig
from router.routing.registry import NAMES
from workers.kv.groups import with_windows

GPU, MODEL = "h100", "llama-3-8b"
AUDIT_EVERY = 64
MAX_PROMPT = 400
CROWDED_EVERY = 4
RARER = 8
BRIMFUL, TORN, LASTING = 4, 1, 5
"""One in this number of clusters is one of `RARER`."""
RAREST, SLOW_LANE = 32, 30
TENANTS = ("", "a", "b")
LATENTS = (0,)
AFTERMATH_S = 30.0
"""Seconds after the end of a fault in which it can explain failed attempts."""
NUM_FAULTS = (0, 2, 5, 10)
ONE_TWO, TWO_TWO = PoolsConfig(prefill=1, decode=2), PoolsConfig(prefill=2, decode=2)
COLOCATED = PoolsConfig(colocated=2)
TEARING = (*2 * (*OF_LANES, Kind.ABORTS), Kind.KILL, Kind.PAUSE, Kind.RESET)
LOSING = (*2 * OF_WORKERS, Kind.DRAIN, Kind.ABORTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakTrial:
    seed: int
    config: SimulationConfig
    sessions: Sequence[UserSession]
    faults: Sequence[Fault]

    @property
    def cluster(self) -> str:
        config, spec = self.config, self.config.spec
        numbers = config.pools.counts()
        if config.pools.colocated:
            pools = f"{config.pools.colocated} colocated"
        else:
            pools = f"{numbers[WorkerRole.PREFILL]}P+{numbers[WorkerRole.DECODE]}D"
        gateways = gateways_text(config.num_gateways)
        memory = f"{spec.num_blocks:,} blocks of {spec.layout.block_size} tokens"
        parts = _kept(spec.layout) + (", drafts" if spec.drafter is not None else "")
        return (
            f"{pools} tp{config.num_gpus} {config.router.policy}, GPU {GPU}, model {MODEL}{parts}{gateways}, {memory}"
        )


def trial(seed: int) -> SoakTrial:
    """Small memories, few workers, short leases and impatient supervisors make rare states frequent. A third of the
    clusters have several tenants with the same prompts; in a third, logprobs of prompts are requested."""
    made = _speculating(_trial(seed), random.Random(f"{seed} drafts"))
    rng = random.Random(f"{seed} tenants")
    tenants = rng.choice((("",), ("",), TENANTS))
    share = rng.choice((0.0, 0.0, 0.3))
    sessions = [_owned(session, rng.choice(tenants), share, rng) for session in made.sessions]
    return replace(made, sessions=sessions)


def _speculating(made: SoakTrial, rng: random.Random) -> SoakTrial:
    """Drafts are seldom, often or always right; some take time, and have no step in flight."""
    acceptance = rng.choice((None, None, None, (1.0,), (0.7, 0.5), (0.1,)))
    max_drafts, is_timed = rng.choice((1, 4, 8)), rng.random() < 0.3
    if acceptance is None:
        return made
    drafter = SimulatedDrafter(
        source="model" if is_timed else "ngram",
        acceptance=acceptance,
        max_drafts=max_drafts,
        latency=Rough(compute_share=1.0) if is_timed else None,
    )
    changes = {"spec.drafter": drafter} | ({"spec.depth": 0} if is_timed else {})
    return replace(made, config=_changed(made.config, changes))


def _owned(session: UserSession, tenant: str, share: float, rng: random.Random) -> UserSession:
    turns = tuple(replace(turn, prompt_logprobs=rng.random() < share) for turn in session.turns)
    return replace(session, tenant=tenant, turns=turns)


def _trial(seed: int) -> SoakTrial:
    rng = random.Random(f"{seed} trial")
    config = _config(seed, rng)
    if seed % CROWDED_EVERY == CROWDED_EVERY - 1:
        return _crowded(seed, config)
    if seed % RARER == BRIMFUL:
        return _brimful(seed, config)
    if seed % RARER == TORN:
        return _torn(seed, config)
    if seed % RARER == LASTING:
        return _lasting(seed, config)
    if seed % RAREST == SLOW_LANE:
        return _slow_lane(seed, config)
    name = rng.choice(("poisson", "bursts", "conversations", "agents", "agents"))
    many_turns = name in ("conversations", "agents")
    num_requests, rate = rng.choice((6, 12, 24)), rng.choice((3.0, 10.0, 40.0))
    longest = rng.choice((40, MAX_PROMPT // 5 if many_turns else MAX_PROMPT))
    load = _load(seed, num_requests, rate, (1, longest), (1, rng.choice((4, 40))))
    num_tokens = config.spec.num_blocks * config.spec.layout.block_size
    room = SessionLimit(num_tokens=num_tokens, limit="worker.num_blocks")
    made = agents(load, num_systems=2, system_tokens=rng.choice((8, 64))) if name == "agents" else GENERATED[name](load)
    sessions = [_hurried(session) for session in made]
    sessions, _ = fitting(sessions, room)
    faults = _faults(config, sessions, rng.choice(NUM_FAULTS))
    return SoakTrial(seed=seed, config=config, sessions=sessions, faults=faults)


def _crowded(seed: int, config: SimulationConfig) -> SoakTrial:
    """Overload: memories that two or three conversations fill, short queues, devices so slow that fetching KV pays."""
    rng = random.Random(f"{seed} crowded")
    block_size = config.spec.layout.block_size
    num_systems, system_tokens = rng.choice((1, 3)), rng.choice((16, 96))
    num_requests, rate = rng.choice((16, 32)), rng.choice((20.0, 100.0))
    load = _load(seed, num_requests, rate, (1, rng.choice((16, 48))), (1, rng.choice((16, 48))))
    made = agents(load, num_systems=num_systems, system_tokens=system_tokens, num_turns=rng.choice((1, 2, 4)))
    sessions = [_hurried(session) for session in made]
    longest = max(session.num_tokens for session in sessions)
    config = _changed(config, {
        "spec.num_blocks": int(-(-longest // block_size) * rng.choice((1.1, 1.5, 2.5))) + 1,
        "spec.scheduler.max_num_seqs": random.Random(f"{seed} seats").choice((3, 16)),
        "spec.scheduler.max_waiting": rng.choice((1, 4, 256)),
        "spec.latency": Rough(compute_share=rng.choice((0.6, 0.002))),
        "spec.decode.headroom": rng.choice((0.0, 0.0, 0.1)),
        "spec.host_blocks": rng.choice((0, 16, 300)),
        "spec.host_bytes_per_s": 50e9,
        "spec.kept_events": rng.choice((2, 4096)),
        "router.admission.max_queued": rng.choice((1, 4, 1024)),
        "router.admission.max_backlog": rng.choice((1, 64)),
        "router.admission.max_backlog_s": 10.0,
        "cards.rate": rng.choice((50e9, 2e8)),
        "max_ttft_s": rng.choice((None, None, None, 1.0)),
    })  # fmt: skip
    faults = _faults(config, sessions, rng.choice(NUM_FAULTS))
    for at_s in rng.choice(((), (0.1, 0.4, 1.0))):  # while KV is on its way, too
        faults.append(Fault(at_s=round(at_s * rng.uniform(0.5, 1.5), 3), kind=Kind.ABORTS, target=CLIENTS, amount=0.2))
    faults.sort(key=lambda fault: (fault.at_s, str(fault)))
    return SoakTrial(seed=seed, config=config, sessions=sessions, faults=faults)


def _brimful(seed: int, config: SimulationConfig) -> SoakTrial:
    """Full memories: prompts that fill their last block, and decode workers that two or three of them fill. Each answer
    lacks one more block, and no other request can release one."""
    rng = random.Random(f"{seed} brimful")
    block_size, num_blocks = config.spec.layout.block_size, rng.choice((2, 5))
    length, num_requests, rate = num_blocks * block_size, rng.choice((6, 12)), rng.choice((40.0, 200.0))
    load = _load(seed, num_requests, rate, (length, length), (1, rng.choice((4, length))))
    sessions = GENERATED["poisson"](load)
    config = _changed(config, {
        "spec.num_blocks": num_blocks * rng.choice((2, 3)),
        "spec.decode.headroom": 0.0,
        "spec.host_blocks": 0,
        "router.local_prefill_tokens": 0,
        "pools": PoolsConfig(prefill=rng.choice((1, 2)), decode=rng.choice((1, 2))),
    })  # fmt: skip
    faults = _faults(config, sessions, rng.choice(NUM_FAULTS))
    return SoakTrial(seed=seed, config=config, sessions=sessions, faults=faults)


def _torn(seed: int, config: SimulationConfig) -> SoakTrial:
    """Slow transfers and pulled prefixes, with lanes that are held up, cut or lose an end."""
    rng = random.Random(f"{seed} torn")
    is_slow = random.Random(f"{seed} slow").random() < 0.5
    load = _load(seed, rng.choice((16, 48)), rng.choice((10.0, 40.0)), (1, 64), (1, 16))
    num_systems = 8 if is_slow else 2
    made = agents(load, num_systems=num_systems, system_tokens=rng.choice((64, 192)), num_turns=rng.choice((1, 4)))
    sessions = [_hurried(session) for session in made]
    config = _changed(config, {
        "spec.num_blocks": (4 * MAX_PROMPT) // config.spec.layout.block_size,
        "spec.latency": Rough(compute_share=0.002),
        "spec.prefill.chunk_bytes": 2**22,
        "router.policy": rng.choice(("round_robin", "least_loaded")),
        "pools": rng.choice((TWO_TWO, ONE_TWO, COLOCATED)),
        "cards.rate": rng.choice((1e8, 2e8)) / (3 if is_slow else 1),
    })  # fmt: skip
    faults = _faults(config, sessions, rng.choice((8, 24)), after_s=0.5, of=TEARING)
    return SoakTrial(seed=seed, config=config, sessions=sessions, faults=faults)


def _lasting(seed: int, config: SimulationConfig) -> SoakTrial:
    """Long answers whose workers are lost, stopped and drained several times."""
    rng = random.Random(f"{seed} lasting")
    num_requests, rate = rng.choice((4, 8)), rng.choice((3.0, 20.0))
    load = _load(seed, num_requests, rate, (1, rng.choice((16, 64))), (64, rng.choice((128, 256))))
    made = agents(load, num_systems=1, system_tokens=32, num_turns=rng.choice((1, 2)))
    read_s = rng.choice((0.0, 0.0, 0.5))
    sessions = [_hurried(session, read_s=read_s) for session in made]
    config = _changed(config, {
        "spec.num_blocks": 4096 // config.spec.layout.block_size,
        "spec.latency": Rough(compute_share=0.01),
        "spec.scheduler.max_num_seqs": 16,
        "pools": rng.choice((ONE_TWO, TWO_TWO, COLOCATED)),
    })  # fmt: skip
    faults = _faults(config, sessions, rng.choice((3, 8, 16)), after_s=4.0, of=LOSING)
    return SoakTrial(seed=seed, config=config, sessions=sessions, faults=faults)


def _slow_lane(seed: int, config: SimulationConfig) -> SoakTrial:
    """One conversation without a fault whose KV travels for longer than a lease."""
    rng = random.Random(f"{seed} slow lane")
    num_turns, length = rng.choice((2, 4)), rng.choice((200, MAX_PROMPT))
    load = _load(seed, num_turns, 1.0, (length, length), (4, 16))
    made = agents(load, num_systems=1, system_tokens=16, num_turns=num_turns)
    config = _changed(config, {
        "spec.num_blocks": 4096 // config.spec.layout.block_size,
        "spec.prefill.chunk_bytes": 2**22,
        "router.local_prefill_tokens": 0,
        "router.dispatch.ticket_lease_s": 1.0,
        "pools": PoolsConfig(prefill=1, decode=1),
        "cards.rate": rng.choice((1e7, 2e7)),
        "cards.max_staged_bytes": rng.choice((2**24, 2**28)),
    })  # fmt: skip
    return SoakTrial(seed=seed, config=config, sessions=[_hurried(session) for session in made], faults=[])


def _changed(value: Any, changes: Mapping[str, Any]) -> Any:
    """Returns a copy with other values at paths such as spec.num_blocks."""
    for path, new in changes.items():
        name, _, rest = path.partition(".")
        value = replace(value, **{name: _changed(getattr(value, name), {rest: new}) if rest else new})
    return value


def _load(
    seed: int, num_requests: int, rate: float, prompts: tuple[int, int], outputs: tuple[int, int]
) -> GeneratedLoad:
    return GeneratedLoad(
        num_requests=num_requests,
        rate=rate,
        prompts=Lengths(low=prompts[0], high=prompts[1]),
        outputs=Lengths(low=outputs[0], high=outputs[1]),
        seed=seed,
    )


def _faults(
    config: SimulationConfig,
    sessions: Sequence[UserSession],
    num: int,
    *,
    after_s: float = 2.0,
    of: Sequence[Kind] = tuple(Kind),
) -> list[Fault]:
    """Faults until `after_s` after the last session begins."""
    until_s = max(session.due_s for session in sessions) + after_s
    return drawn(
        num, seed=config.seed, workers=config.pools.worker_ids(), num_gateways=config.num_gateways, until_s=until_s,
        with_store=config.shared_index, of=of,
    )  # fmt: skip


def run(made: SoakTrial, *, write: Callable[[str], object] | None = None) -> SimulationOutcome:
    """Raises AssertionError for a broken invariant, and for an error that no fault explains."""
    outcome = simulate(made.config, made.sessions, made.faults, write=write)
    excuses = _excuses(made)
    for record in outcome.records:
        assert not record.error or record.error in excuses, (
            f"request {record.index} ended with {record.error}: nothing that happens here is a reason for it"
        )
    for failure in outcome.failures:
        assert any(_hurts(fault, failure) for fault in made.faults) or failure.code == Overloaded.code, (
            f"an attempt of {failure.request_id} failed {failure.at_s:.3f} s after the load began with {failure.code} "
            f"({failure.message}): nothing that happened until then is a reason for it"
        )
    return outcome


def _hurts(fault: Fault, failure: Failure) -> bool:
    """Whether a fault explains the failure. Its effects end when leases have ended and a lost worker is back; a slow
    lane keeps its card busy for an unknown time after it is given up."""
    if failure.at_s < fault.at_s:
        return False
    if fault.kind is Kind.GATEWAY_RESTART:
        return failure.code == NoWorkers.code
    if fault.kind not in (*OF_WORKERS, *OF_LANES):
        return False
    lasts_s = fault.duration_s if fault.kind in LASTING_FAULTS else 0.0
    return fault.kind is Kind.LANE_SLOW or failure.at_s <= fault.at_s + lasts_s + AFTERMATH_S


def _excuses(made: SoakTrial) -> set[str]:
    """Returns the errors that clients may get."""
    kinds, router = [fault.kind for fault in made.faults], made.config.router
    num_asked = sum(len(session.turns) for session in made.sessions)
    possible = {ABORTED: Kind.ABORTS in kinds, GATEWAY_LOST: Kind.GATEWAY_RESTART in kinds}
    # KV over a stalled lane holds its blocks for a lease. Here a worker may go without a step no longer than that.
    stalls = any(
        fault.kind is Kind.LANE_STALL and fault.duration_s >= made.config.spec.stall_s for fault in made.faults
    )
    num_worker_faults = sum(kind in OF_WORKERS for kind in kinds)
    possible[RequestKillsWorkers.code] = stalls or num_worker_faults >= router.dispatch.max_worker_crashes
    possible[Overloaded.code] = router.admission.max_queued < num_asked or made.config.max_ttft_s is not None
    possible[InvalidRequest.code] = made.config.max_ttft_s is not None
    return {code for code, may_be in possible.items() if may_be}


def is_broken_invariant(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.split(AssertionError)[1] is None
    return isinstance(error, AssertionError)


def reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _config(seed: int, rng: random.Random) -> SimulationConfig:
    block_size = rng.choice((4, 16))
    settings = read_settings(f"worker.block_size={block_size}")
    leaping = random.Random(f"{seed} leaps").random() < 0.5
    spec = hardware_spec(gpu=GPU, model=MODEL, tp=1, settings=settings, leaping=leaping)
    spec = replace(
        spec,
        latency=Rough(),
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
        layout=spec.layout if seed % RAREST == SLOW_LANE else _layout(spec.layout, random.Random(f"{seed} layout")),
        **_host(random.Random(f"{seed} host")),
    )
    router = simulated_router(
        policy=rng.choice(sorted(NAMES)),
        local_prefill_tokens=rng.choice((0, 32)),
        dispatch=DispatchConfig(ticket_lease_s=rng.choice((1.0, 10.0)), max_attempts=20),
        admission=AdmissionConfig(max_queue_s=120.0),
    )
    return SimulationConfig(
        pools=_pools(rng),
        spec=spec,
        router=router,
        supervision=SupervisionConfig(health_period_s=1.0, max_failed_checks=2),
        cards=Cards(max_staged_bytes=random.Random(f"{seed} staged").choice((1, 2**28))),
        wire=NetworkModel(jitter_s=rng.choice((0.0, 0.005)), loss=rng.choice((0.0, 0.02))),
        num_gateways=rng.choice((1, 1, 2)),
        shared_index=random.Random(f"{seed} store").random() < 0.25,
        load_s=rng.choice((0.2, 2.0)),
        max_skew_s=1e5,
        usd_per_gpu_hour=gpu_of(GPU).usd_per_hour,
        audit_every=AUDIT_EVERY,
        patience_s=400.0,
        seed=seed,
    )


def _host(rng: random.Random) -> dict[str, Any]:
    return {"host_blocks": rng.choice((0, 0, 8, 300)), "host_bytes_per_s": rng.choice((1e9, 50e9))}


def _layout(dense: KVLayout, rng: random.Random) -> KVLayout:
    """Draws a layout: half of the clusters keep keys and values of all positions; the others have windows or
    latents."""
    windows: tuple[int | None, ...] = rng.choice(((), (), (), (), (24, None), (100, 20, None), (40,), LATENTS))
    if windows == LATENTS:
        return KVLayout.latent(num_layers=8, width=576, dtype="bfloat16", block_size=dense.block_size)
    turns = windows or (None,)
    return with_windows(dense, [turns[layer % len(turns)] for layer in range(dense.num_layers)])


def _kept(layout: KVLayout) -> str:
    if layout.frees_blocks:
        sizes = sorted({window for window in layout.windows if window is not None})
        full = "" if None in layout.windows else " in all layers"
        return f", windows {' and '.join(map(str, sizes))}{full}"
    return ", latents" if layout.parts[0].name == LATENT else ""


def _pools(rng: random.Random) -> PoolsConfig:
    if rng.random() < 0.2:
        return PoolsConfig(colocated=rng.choice((1, 2)))
    return PoolsConfig(prefill=rng.choice((0, 1, 1, 2)), decode=rng.choice((1, 2, 3)))


def _hurried(session: UserSession, *, read_s: float = 0.0) -> UserSession:
    """Shortens pauses: the soak looks for faults in turns, not between them."""
    turns = tuple(replace(turn, pause_s=turn.pause_s / 20, read_s=read_s) for turn in session.turns)
    return replace(session, turns=turns)
