"""The scenario of `baton simulate`, from flags and settings: hardware, load and faults, equal for all clusters of a
sweep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cluster.bench.report import Objective
from cluster.bench.workload import Lengths
from cluster.config.config import ClusterConfig, PoolsConfig
from cluster.config.settings import Table
from cluster.simulate.latency.hardware import gpu_of, model_of
from cluster.simulate.latency.shapes import HOST_GPUS
from cluster.simulate.node.worker import Spec
from cluster.simulate.results.report import Summary, summarise
from cluster.simulate.results.sweep import ClusterChoice
from cluster.simulate.run.config import (
    SimulationConfig,
    gateways_text,
    hardware_spec,
    in_force,
    read_settings,
    room_of,
    without_effect,
)
from cluster.simulate.run.drafters import parse_acceptance
from cluster.simulate.run.offered import offered, work_of_sessions
from cluster.simulate.run.progress import warn
from cluster.simulate.run.simulation import SimulationOutcome
from cluster.simulate.world.faults import Fault, drawn
from cluster.simulate.world.lanes import Cards, hosts_of
from cluster.simulate.world.workload import (
    GeneratedLoad,
    SessionLimit,
    UserSession,
    fitting,
    generated_at_rate,
    least_requests,
    recorded,
)
from protos.errors import Misconfigured
from protos.values import WorkerRole
from router.policies.registry import NAMES
from router.prefix.registry import MEMORY

MAX_LANE_GBPS = 1e6
_AS_GIVEN = (
    "model", "dtype", "nvlink", "gateways", "audit_every", "seed", "workload", "num_requests"
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """`lane_rate`: bytes a second of each GPU's network card. With `nvlink`, lanes between workers of one host use
    NVLink."""

    gpu: str
    model: str
    dtype: str | None
    settings: ClusterConfig
    lane_rate: float
    nvlink: bool
    usd_per_gpu_hour: float
    gateways: int | None
    leaping: bool
    audit_every: int
    seed: int
    num_requests: int | None
    objective: Objective
    workload: str
    load: GeneratedLoad | None
    sessions: Sequence[UserSession]
    faults: Sequence[Fault]
    num_faults: int
    acceptance: Sequence[float]

    def config(self, choice: ClusterChoice) -> SimulationConfig:
        """Raises Misconfigured."""
        pools = PoolsConfig(
            prefill=choice.prefill, decode=choice.decode, prefill_tp=choice.prefill_tp, decode_tp=choice.decode_tp
        )
        if not choice.prefill:
            pools = PoolsConfig(colocated=choice.decode)
        own = {WorkerRole.PREFILL: choice.prefill_tp, WorkerRole.DECODE: choice.decode_tp}
        specs = {
            role: self._spec(pools.tp(role, choice.tp), "--tp" if own.get(role) is None else f"--{role}-tp")
            for role in pools.counts()
        }
        config = SimulationConfig(
            pools=pools,
            spec=next(iter(specs.values())),
            specs=specs,
            router=replace(self.settings.router, policy=choice.policy),
            supervision=self.settings.supervision,
            num_gateways=self.num_gateways,
            siblings=self.siblings,
            shared_index=self.settings.index != MEMORY,
            num_gpus=choice.tp,
            usd_per_gpu_hour=self.usd_per_gpu_hour,
            audit_every=self.audit_every,
            seed=self.seed,
        )
        return replace(config, cards=self._cards(config))

    def _spec(self, tp: int, flag: str) -> Spec:
        return hardware_spec(
            gpu=self.gpu,
            model=self.model,
            tp=tp,
            dtype=self.dtype,
            settings=self.settings,
            leaping=self.leaping,
            flag=flag,
            acceptance=self.acceptance,
        )

    def _cards(self, config: SimulationConfig) -> Cards:
        """Network cards of the workers: one for each GPU."""
        num_gpus = config.gpus_by_worker()
        cards = replace(config.cards, rates={worker: num * self.lane_rate for worker, num in num_gpus.items()})
        if not self.nvlink:
            return cards
        link_rate = gpu_of(self.gpu).link_rate
        links = {worker: num * link_rate for worker, num in num_gpus.items()}
        return replace(cards, links=links, hosts=hosts_of(num_gpus))

    def check_hosts(self, every: Iterable[ClusterChoice]) -> None:
        """Warns of mixtures of experts on workers of several hosts that share every layer."""
        most = max(max(one.tp, one.prefill_tp or 0, one.decode_tp or 0) for one in every)
        if most > HOST_GPUS and model_of(self.model).experts is not None:
            warn(
                f"{most} GPUs on several hosts share every layer of {self.model}, which is slow: such models are "
                "served with attention of their own on each GPU, which is not simulated"
            )

    def fitting(self, config: SimulationConfig) -> tuple[list[UserSession], list[UserSession]]:
        """The sessions that fit the workers, and the others. Raises Misconfigured if none fits."""
        return fitting(self.sessions, self.room(config))

    def room(self, config: SimulationConfig) -> SessionLimit:
        """The room of the smallest worker."""
        specs = config.specs.values() or (config.spec,)
        return min((room_of(spec, self.settings.worker) for spec in specs), key=lambda room: room.num_tokens)

    def cluster(self, choice: ClusterChoice) -> dict[str, Any]:
        given = {name: value for name, value in asdict(choice).items() if value is not None}
        more: dict[str, Any] = {} if self.dtype is None else {"dtype": self.dtype}
        if self.settings.worker.expert_parallel:
            more["expert_parallel"] = True
        if self.acceptance:
            more["acceptance"] = list(self.acceptance)
        return {**given, "gateways": self.num_gateways, "gpu": self.gpu, "model": self.model, **more}

    @property
    def num_gateways(self) -> int:
        return self.gateways or self.settings.processes

    @property
    def siblings(self) -> bool:
        return self.gateways is None and self.num_gateways > 1

    def in_force(self) -> Table:
        settings = in_force(self.settings)
        if self.gateways is not None:
            del settings["processes"]  # of a gateway process; the simulator has none
        return settings

    @property
    def is_open_ended(self) -> bool:
        """Whether the load is as long as its figures need: generated, without a number of requests, and untroubled."""
        return self.load is not None and not self.num_requests and not self.is_troubled

    @property
    def is_troubled(self) -> bool:
        return bool(self.faults or self.num_faults)

    def longer(self, num_requests: int) -> Scene:
        assert self.load is not None
        load = replace(self.load, num_requests=num_requests)
        return replace(self, load=load, sessions=generated_at_rate(self.workload, load))

    def offered(self, config: SimulationConfig) -> Mapping[WorkerRole, float]:
        """The share of its capacity that a generated load asks of each pool at least; empty for a trace and in
        trouble."""
        if self.load is None or self.is_troubled:
            return {}
        return offered(config, work_of_sessions(self.sessions), self.load.num_requests / self.load.rate)

    def summary(self, choice: ClusterChoice, outcome: SimulationOutcome, left_out: Sequence[UserSession]) -> Summary:
        cluster = f"{choice}, {self.hardware}"
        endless = self.load is not None
        return summarise(outcome, self.objective, cluster=cluster, left_out=left_out, is_endless=endless)

    @property
    def hardware(self) -> str:
        """The sources of times, sizes and prices, and the number of gateways, in words."""
        model = f"{Path(self.model).name}{'' if self.dtype is None else f' in {self.dtype}'}"
        model += ", whole experts on GPUs" if self.settings.worker.expert_parallel else ""
        model += f", drafts by {self.settings.worker.speculate}" if self.acceptance else ""
        return f"GPU {Path(self.gpu).name}, model {model}{gateways_text(self.num_gateways, siblings=self.siblings)}"

    def schedule(self, config: SimulationConfig, sessions: Sequence[UserSession]) -> list[Fault]:
        """The faults given by --fault, and random ones."""
        workers = config.pools.worker_ids()
        until_s = max(session.due_s for session in sessions)
        random = drawn(
            self.num_faults, seed=self.seed, workers=workers, num_gateways=config.num_gateways, until_s=until_s,
            with_store=config.shared_index,
        )  # fmt: skip
        return sorted([*self.faults, *random], key=lambda fault: fault.at_s)


def make_scene(given: Mapping[str, Any]) -> Scene:
    """From the values of `baton simulate`'s flags. Raises Misconfigured."""
    gpu = given["gpu"]
    load = None if given["trace"] is not None else _load(given)
    return Scene(
        **{name: given[name] for name in _AS_GIVEN},
        gpu=gpu,
        settings=_settings(given),
        lane_rate=_lane_rate(gpu, given["lane_gbps"]),
        usd_per_gpu_hour=_price(gpu, given["usd_per_gpu_hour"]),
        leaping=not given["single_step"],
        objective=Objective(ttft_s=_seconds(given["ttft_ms"]), tpot_s=_seconds(given["tpot_ms"])),
        load=load,
        sessions=_recorded(given) if load is None else generated_at_rate(given["workload"], load),
        faults=[Fault.parse(text) for text in given["fault"] or ()],
        num_faults=given["faults"],
        acceptance=parse_acceptance(given["acceptance"]),
    )


def _recorded(given: Mapping[str, Any]) -> list[UserSession]:
    """Raises Misconfigured."""
    limit, speed, scale = given["num_requests"], given["trace_speed"], given["trace_scale"]
    sessions = recorded(given["trace"], limit=limit, speed=speed, scale=scale)
    if limit is not None and len(sessions) < limit:
        warn(f"--requests {limit}: {given['trace']} has only {len(sessions):,}")
    return sessions


def _load(given: Mapping[str, Any]) -> GeneratedLoad:
    """Raises Misconfigured."""
    return GeneratedLoad(
        num_requests=given["num_requests"] or least_requests(given["workload"], given["rate"]),
        rate=given["rate"],
        seed=given["seed"],
        prompts=Lengths.parse(given["input_len"], param="input-len"),
        outputs=Lengths.parse(given["output_len"], param="output-len"),
    )


def _price(gpu: str, usd_per_gpu_hour: float | None) -> float:
    """Raises Misconfigured."""
    usual = gpu_of(gpu).usd_per_hour
    if usd_per_gpu_hour == math.inf:
        raise Misconfigured("--usd-per-gpu-hour inf: give a price, 0 or more", param="usd-per-gpu-hour")
    return usual if usd_per_gpu_hour is None else usd_per_gpu_hour


def _lane_rate(gpu: str, gbps: float | None) -> float:
    """Bytes a second. Raises Misconfigured."""
    if gbps is None:
        return gpu_of(gpu).network_rate
    if not 0 < gbps <= MAX_LANE_GBPS:
        raise Misconfigured(
            f"--lane-gbps {gbps:g}: give the gigabits a second of one GPU's network card, such as 400: above 0, at "
            f"most {MAX_LANE_GBPS:,.0f}",
            param="lane-gbps",
        )
    return gbps * 1e9 / 8


def _settings(given: Mapping[str, Any]) -> ClusterConfig:
    """Warns of settings of `--set` that have no effect in a simulation. Raises Misconfigured."""
    further, host_kv_gib, kv_dtype = given["further"] or (), given["host_kv_gib"], given["kv_dtype"]
    above = [] if host_kv_gib is None else [f"worker.host_kv_gib={host_kv_gib!r}"]
    above += [] if kv_dtype is None else [f"worker.kv_dtype={kv_dtype}"]
    above += [] if given["speculate"] is None else [f"worker.speculate={given['speculate']}"]
    whole = given["expert_parallel"]
    above += [] if whole is None else [f"worker.expert_parallel={str(whole).lower()}"]
    if given["policy"] is not None:
        above.append(f"router.policy={NAMES[0]}")  # the policy of each cluster comes from flags
    settings = read_settings(given["file"], (*further, *above))
    if names := without_effect(further):
        warn(f"no effect in a simulation: --set {', '.join(names)}")
    return settings


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
