"""A scenario ready to run: settings, requests and faults, equal for all clusters of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cluster.bench.bench_load import Lengths
from cluster.bench.bench_report import Objective
from cluster.cli.terminal_tables import warn
from cluster.config.cluster_config import ClusterConfig, PoolsConfig
from cluster.config.scenario import Scenario, WorkloadTable
from cluster.config.settings import merge, read_file
from cluster.simulate.latency.gpus_and_models import gpu_of
from cluster.simulate.results.summary import Summary, summarise
from cluster.simulate.run.choices import ClusterChoice
from cluster.simulate.run.offered import offered, work_of_sessions
from cluster.simulate.run.simulation import SimulationOutcome
from cluster.simulate.run.simulation_config import (
    SimulationConfig,
    gateways_text,
    hardware_spec,
    room_of,
    settings_of,
    without_effect,
)
from cluster.simulate.world.faults import Fault, drawn
from cluster.simulate.world.simulated_lanes import Cards
from cluster.simulate.world.simulated_load import (
    GeneratedLoad,
    SessionLimit,
    UserSession,
    fitting,
    generated_at_rate,
    least_requests,
    recorded,
)
from protos.values import WorkerRole
from router.prefix.registry import MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """`load` is None for a trace."""

    scenario: Scenario
    settings: ClusterConfig
    load: GeneratedLoad | None
    sessions: Sequence[UserSession]
    faults: Sequence[Fault]

    @property
    def objective(self) -> Objective:
        return Objective.of(self.scenario.objectives)

    @property
    def usd_per_gpu_hour(self) -> float:
        hardware = self.scenario.hardware
        usual = gpu_of(hardware.gpu).usd_per_hour
        return usual if hardware.usd_per_gpu_hour is None else hardware.usd_per_gpu_hour

    def config(self, choice: ClusterChoice) -> SimulationConfig:
        """Raises Misconfigured."""
        pools = PoolsConfig(
            prefill=choice.prefill, decode=choice.decode, prefill_tp=choice.prefill_tp, decode_tp=choice.decode_tp
        )
        if not choice.prefill:
            pools = PoolsConfig(colocated=choice.decode)
        hardware = self.scenario.hardware
        specs = {
            role: hardware_spec(
                gpu=hardware.gpu,
                model=hardware.model,
                tp=pools.tp(role, choice.tp),
                dtype=hardware.dtype,
                settings=self.settings,
                key="tp" if getattr(pools, f"{role}_tp", None) is None else f"{role}_tp",
                acceptance=hardware.acceptance,
            )
            for role in pools.counts()
        }
        config = SimulationConfig(
            pools=pools,
            spec=next(iter(specs.values())),
            specs=specs,
            router=replace(self.settings.router, policy=choice.policy),
            supervision=self.settings.supervision,
            num_gateways=self.scenario.cluster.gateways,
            shared_index=self.settings.index != MEMORY,
            num_gpus=choice.tp,
            usd_per_gpu_hour=self.usd_per_gpu_hour,
            audit_every=self.scenario.faults.audit_every,
            seed=self.scenario.seed,
        )
        rate = gpu_of(hardware.gpu).network_rate if hardware.lane_gbps is None else hardware.lane_gbps * 1e9 / 8
        return replace(
            config, cards=Cards(rates={worker: num * rate for worker, num in config.gpus_by_worker().items()})
        )

    def fitting(self, config: SimulationConfig) -> tuple[list[UserSession], list[UserSession]]:
        """Returns the sessions that fit, and the others. Raises Misconfigured if none fits."""
        return fitting(self.sessions, self.room(config))

    def room(self, config: SimulationConfig) -> SessionLimit:
        specs = config.specs.values()
        return min((room_of(spec, self.settings.worker) for spec in specs), key=lambda room: room.num_tokens)

    def cluster(self, choice: ClusterChoice) -> dict[str, Any]:
        return {name: value for name, value in asdict(choice).items() if value is not None}

    @property
    def is_open_ended(self) -> bool:
        """Whether the load lasts until its figures are steady."""
        return self.load is not None and not self.scenario.workload.requests and not self._is_troubled

    @property
    def _is_troubled(self) -> bool:
        return bool(self.faults or self.scenario.faults.random)

    def longer(self, num_requests: int) -> Scene:
        assert self.load is not None
        load = replace(self.load, num_requests=num_requests)
        return replace(self, load=load, sessions=generated_at_rate(self.scenario.workload.name, load))

    def offered(self, config: SimulationConfig) -> Mapping[WorkerRole, float]:
        """The least share of its capacity that a generated load needs of each pool; empty for a trace and with
        faults."""
        if self.load is None or self._is_troubled:
            return {}
        return offered(config, work_of_sessions(self.sessions), self.load.num_requests / self.load.rate)

    def summary(self, choice: ClusterChoice, outcome: SimulationOutcome, left_out: Sequence[UserSession]) -> Summary:
        cluster, is_endless = f"{choice}, {self.hardware}", self.load is not None
        return summarise(outcome, self.objective, cluster=cluster, left_out=left_out, is_endless=is_endless)

    @property
    def hardware(self) -> str:
        hardware, worker = self.scenario.hardware, self.settings.worker
        model = f"{Path(hardware.model).name}{'' if hardware.dtype is None else f' in {hardware.dtype}'}"
        model += ", whole experts on GPUs" if worker.expert_parallel else ""
        model += f", drafts by {worker.speculate}" if hardware.acceptance else ""
        return f"GPU {Path(hardware.gpu).name}, model {model}{gateways_text(self.scenario.cluster.gateways)}"

    def schedule(self, config: SimulationConfig, sessions: Sequence[UserSession]) -> list[Fault]:
        until_s = max(session.due_s for session in sessions)
        random = drawn(
            self.scenario.faults.random, seed=self.scenario.seed, workers=config.pools.worker_ids(),
            num_gateways=config.num_gateways, until_s=until_s, with_store=config.shared_index,
        )  # fmt: skip
        return sorted([*self.faults, *random], key=lambda fault: fault.at_s)


def make_scene(scenario: Scenario) -> Scene:
    """Warns of settings without effect. Raises Misconfigured."""
    in_file = read_file(Path(scenario.config)) if scenario.config else {}
    if names := without_effect(scenario.settings):
        warn(f"no effect in a simulation: settings.{', settings.'.join(names)}")
    settings, workload = settings_of(merge(in_file, scenario.settings)), scenario.workload
    load = None if workload.trace else _load(workload, scenario.seed)
    return Scene(
        scenario=scenario,
        settings=settings,
        load=load,
        sessions=_recorded(workload) if load is None else generated_at_rate(workload.name, load),
        faults=[Fault.parse(text) for text in scenario.faults.schedule],
    )


def _recorded(workload: WorkloadTable) -> list[UserSession]:
    """Raises Misconfigured."""
    speed, scale = workload.trace_speed, workload.trace_scale
    sessions = recorded(Path(workload.trace), limit=workload.requests, speed=speed, scale=scale)
    if workload.requests is not None and len(sessions) < workload.requests:
        warn(f"workload.requests = {workload.requests}: {workload.trace} has only {len(sessions):,}")
    return sessions


def _load(workload: WorkloadTable, seed: int) -> GeneratedLoad:
    """Raises Misconfigured."""
    return GeneratedLoad(
        num_requests=workload.requests or least_requests(workload.name, workload.rate),
        rate=workload.rate,
        seed=seed,
        prompts=Lengths.parse(workload.input_len, param="workload.input_len"),
        outputs=Lengths.parse(workload.output_len, param="workload.output_len"),
    )
