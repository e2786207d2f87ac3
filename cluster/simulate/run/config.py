"""A simulated deployment as one frozen value. Impossible settings raise Misconfigured, which names the flag."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.config.config import ClusterConfig, PoolsConfig, SupervisionConfig
from cluster.config.settings import (
    Table,
    make_blaming,
    make_config,
    merge,
    paths_of,
    read_file,
    setting,
    table_of,
    to_toml,
)
from cluster.simulate.latency.base import Latency
from cluster.simulate.latency.hardware import gpu_of, model_of
from cluster.simulate.latency.roofline import HOST_S, Roofline, check_fitted
from cluster.simulate.latency.shapes import MODELS, Gpu, ModelShape, num_blocks
from cluster.simulate.node.worker import Spec
from cluster.simulate.run.drafters import DraftingDevice, drafter_of
from cluster.simulate.world.lanes import Cards
from cluster.simulate.world.network import NetworkModel
from cluster.simulate.world.workload import SessionLimit
from kvtransfer.windows import PageWindows
from prefill_pool.config import PrefillConfig
from protos.errors import Misconfigured
from protos.hints import counted
from protos.values import KVLayout, WorkerRole
from router.config import RouterConfig
from router.policies.registry import check_name
from workers.config import SchedulerConfig, WorkerConfig

VOCAB_SIZE = 32_768
MEMORY_SHARE = 0.9
MAX_HOST_GIB = 16_384  # of one worker
MAX_BLOCKS = 4_000_000  # of one worker: 400 MB and three seconds
SIMULATED_DTYPES = ("auto", "bfloat16")
CHUNK_BYTES = 128 * 2**20  # copied in a tenth of a millisecond; larger chunks make fewer events
HOST_SHARE = 0.8  # share of PCIe's nominal rate, in copies of whole blocks
GPU_WORKERS: Table = {
    "model": "simulated",
    "worker": {"block_size": 64, "max_num_batched_tokens": 8192, "max_num_seqs": 256, "prefill_chunk": 8192},
}
"""Defaults for large models on GPUs; a file and `--set` override them."""
WITHOUT_EFFECT = frozenset({
    "host", "port", "grpc_port", "served_name", "discovery", "lanes", "ray", "tls", "peers", "supervision.grace_s",
    "worker.device", "worker.cuda_graphs", "worker.bind_cores",
    "router.shadow_policy", "router.tenants", "router.http.max_body_bytes",
    "router.http.keep_alive_s", "router.http.cors_origins", "router.http.hosts", "router.dispatch.canary_every",
    "router.text.tool_parser", "router.text.disable_any_whitespace", "router.text.reasoning_parser",
    "router.text.chat_template", "router.text.pooling",
})  # fmt: skip
"""Settings, and whole tables, that change no result of a simulation."""
OF_A_CLUSTER = frozenset({"model", "pools", "worker.tp", "router.policy"})
"""Settings, and whole tables, that differ between clusters of a sweep, or come from flags only."""


def simulated_router(policy: str = "prefix_aware", **settings: Any) -> RouterConfig:
    """A gateway's settings without a checkpoint: prompts are token ids."""
    return RouterConfig(model_path=Path("simulated"), model_name="simulated", policy=policy, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """A simulated deployment.

    - workers of a role have `specs`, else `spec`, and the GPUs of `pools`, else `num_gpus`
    - `load_s`: from a worker's launch until it serves
    - `audit_every`: events between two checks of all invariants; 0: only at the end
    - `patience_s`: a request without progress for this long is stuck
    - `max_ttft_s`: of all requests, if given
    - `siblings`: the gateways are processes of one, and publish routed work and failures to each other
    - `shared_index`: the gateways have a Redis
    - `request_s`: a gateway's time for a request besides routing, one request after the other
    """

    pools: PoolsConfig
    spec: Spec
    specs: Mapping[WorkerRole, Spec] = field(default_factory=dict)
    router: RouterConfig = field(default_factory=simulated_router)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    wire: NetworkModel = field(default_factory=NetworkModel)
    cards: Cards = field(default_factory=Cards)
    num_gateways: int = 1
    siblings: bool = False
    shared_index: bool = False
    num_gpus: int = 1
    usd_per_gpu_hour: float = 0.0
    load_s: float = 5.0
    max_skew_s: float = 0.0
    audit_every: int = 0
    patience_s: float = 600.0
    max_ttft_s: float | None = None
    request_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_gateways < 1:
            raise Misconfigured(f"--gateways {self.num_gateways}: give at least 1", param="gateways")

    def spec_of(self, role: WorkerRole) -> Spec:
        return self.specs.get(role, self.spec)

    def gpus_of(self, role: WorkerRole) -> int:
        return self.pools.tp(role, self.num_gpus)

    def gpus_by_worker(self) -> dict[str, int]:
        """By worker id, in the order of their pools."""
        return {worker: self.gpus_of(WorkerRole(worker.rpartition("-")[0])) for worker in self.pools.worker_ids()}


def read_settings(file: Path | None, further: Sequence[str]) -> ClusterConfig:
    """The settings that `baton serve` would read, over the defaults of a GPU's worker. Raises Misconfigured, also for a
    dtype whose memory simulated models do not model."""
    settings: Table = read_file(file) if file is not None else {}
    over: Table = {}
    for one in further:
        if "model" in (table := setting(one)):
            raise Misconfigured(
                f"--set {one}: no checkpoint is read: give --model one of {', '.join(MODELS)}", param="model"
            )
        over = merge(over, table)
    return make_blaming(file, settings, over, _make)


def _make(tables: Table) -> ClusterConfig:
    config = replace(make_config(merge(GPU_WORKERS, tables)), prefill=PrefillConfig(chunk_bytes=CHUNK_BYTES))
    for name in config.router.policy.split(","):  # a sweep tries all of these policies
        check_name(name)
    if config.worker.dtype not in SIMULATED_DTYPES:
        raise Misconfigured(
            f"worker.dtype = {config.worker.dtype!r}: simulated KV is bfloat16, and weights are no larger, so "
            "sizes would not be yours: leave it out",
            param="worker.dtype",
        )
    return config


def without_effect(further: Sequence[str]) -> list[str]:
    """The settings of `--set` without effect in a simulation."""
    given = (path for one in further for path, _ in paths_of(setting(one)))
    return [path for path in dict.fromkeys(given) if _is_in(path, WITHOUT_EFFECT)]


def gateways_text(num: int, *, siblings: bool) -> str:
    """The gateways, for a report's cluster; "" for a single gateway."""
    if num == 1:
        return ""
    return f", {num:,} processes of one gateway" if siblings else f", {num:,} gateways"


def in_force(settings: ClusterConfig) -> Table:
    """The settings, by table, that decide a simulation besides its cluster: from files, flags and defaults, without
    those that are derived at the start."""
    kept: Table = {}
    for path, value in paths_of(tomllib.loads(to_toml(settings))):
        if not _is_in(path, WITHOUT_EFFECT | OF_A_CLUSTER):
            kept = merge(kept, table_of(path, value))
    return kept


def _is_in(path: str, listed: frozenset[str]) -> bool:
    """Whether a setting, or a table around it, is listed."""
    parts = path.split(".")
    return any(".".join(parts[:length]) in listed for length in range(1, len(parts) + 1))


def hardware_spec(
    *,
    gpu: str,
    model: str,
    tp: int,
    dtype: str | None = None,
    settings: ClusterConfig | None = None,
    latency: Latency | None = None,
    leaping: bool = True,
    flag: str = "--tp",
    acceptance: Sequence[float] = (),
) -> Spec:
    """Workers of `tp` GPUs each, with the KV cache that fits beside weights of `dtype`. Step times are measured
    (`latency`) or the roofline's. `flag` set `tp`. `acceptance` is that of drafts, if there are any. Raises
    Misconfigured."""
    settings = settings or read_settings(None, ())
    worker = settings.worker
    card = gpu_of(gpu)
    shape = _shape(model, dtype, worker)
    if latency is None:
        check_fitted(gpu, card, model, shape)
    if tp < 1:
        raise Misconfigured(f"{flag} {tp}: give at least 1", param="tp")
    _check_ranks(model, shape, tp, flag)
    shares = () if latency is not None else shape.window_shares  # measured steps have the windows of their model
    drafter = drafter_of(worker, acceptance, _drafting(card, shape, tp, latency))
    usual_depth = 0 if drafter is not None and drafter.latency is not None else 1
    depth = usual_depth if worker.steps_in_flight is None else worker.steps_in_flight
    blocks = _num_blocks(worker, card, shape, tp, measured=latency is not None)
    if latency is None:
        host_s = 0.0 if depth or drafter is not None else HOST_S
        latency = Roofline(gpu=card, model=shape, tp=tp, host_s=host_s)
    layout = shape.layout(worker.block_size)
    host_blocks = _host_blocks(worker, layout)
    return Spec(
        model=model,
        layout=layout,
        num_blocks=blocks,
        scheduler=SchedulerConfig(
            max_model_len=worker.max_model_len or shape.max_len,
            vocab_size=VOCAB_SIZE,
            **worker.step_limits(),
        ),
        latency=latency,
        prefill=settings.prefill,
        decode=settings.decode,
        depth=depth,
        leaping=leaping,
        host_blocks=host_blocks,
        host_bytes_per_s=card.host_rate * tp * HOST_SHARE,
        shares=shares,
        drafter=drafter,
    )


def _host_blocks(worker: WorkerConfig, layout: KVLayout) -> int:
    """Raises Misconfigured."""
    if worker.host_kv_gib > MAX_HOST_GIB:
        raise Misconfigured(
            f"--host-kv-gib {worker.host_kv_gib:g} (worker.host_kv_gib): give at most {MAX_HOST_GIB:,}",
            param="host-kv-gib",
        )
    host_blocks = int(worker.host_kv_gib * 2**30) // layout.stored_bytes
    if worker.host_kv_gib and not host_blocks:
        raise Misconfigured(
            f"--host-kv-gib {worker.host_kv_gib:g} (worker.host_kv_gib): give 0, or at least the "
            f"{layout.stored_bytes / 2**30:.4f} GiB of a block",
            param="host-kv-gib",
        )
    return host_blocks


def _drafting(card: Gpu, shape: ModelShape, tp: int, latency: Latency | None) -> DraftingDevice:
    def step_times(drafting: ModelShape) -> Latency:
        return Roofline(gpu=card, model=drafting, tp=tp)

    return DraftingDevice(shape=shape, step_times=None if latency is not None else step_times)


def _shape(model: str, dtype: str | None, worker: WorkerConfig) -> ModelShape:
    """The model as the worker's settings have it. Raises Misconfigured."""
    shape = model_of(model, dtype, whole_experts=worker.expert_parallel)
    return replace(shape, kv_dtype=worker.kv_dtype, free_windows=worker.free_windows)


def _check_ranks(model: str, shape: ModelShape, tp: int, flag: str) -> None:
    """Raises Misconfigured for a number of GPUs that heads cannot be divided by."""
    if shape.splits(tp):
        return
    possible = f"give one of {', '.join(str(one) for one in range(1, shape.heads + 1) if shape.splits(one))}"
    raise Misconfigured(
        f"{flag} {tp}: it must divide the {shape.heads} heads of {model}, and divide its {shape.kv_heads} key/value "
        f"heads or be a multiple of them: {possible}",
        param="tp",
    )


def _num_blocks(worker: WorkerConfig, card: Gpu, shape: ModelShape, tp: int, *, measured: bool) -> int:
    """Configured blocks must fit beside the weights, unless times were `measured`, on a machine of unknown memory.
    Raises Misconfigured."""
    num, share = worker.num_blocks, worker.memory_fraction or MEMORY_SHARE
    if num is not None and measured:
        if num > MAX_BLOCKS:
            raise Misconfigured(
                f"worker.num_blocks = {num:,}: give as many as the measured workers had, at most {MAX_BLOCKS:,}",
                param="worker.num_blocks",
            )
        return num
    most = num_blocks(card, shape, tp=tp, block_size=worker.block_size, memory_share=share)
    if num is None:
        return most
    if num > most:
        need = shape.stored_bytes(tp, worker.block_size) * num / 1e9
        raise Misconfigured(
            f"worker.num_blocks = {num:,}: they need {need:,.0f} GB, and beside the weights is room for "
            f"{counted(most, 'block')} in {share:g} (worker.memory_fraction) of the memory of --tp {tp}: give at most "
            f"{most:,}, give more GPUs, or leave it out",
            param="worker.num_blocks",
        )
    return num


def room_of(spec: Spec, worker: WorkerConfig) -> SessionLimit:
    """The room for one session in a worker that `hardware_spec` made of these settings."""
    windows = PageWindows(block_size=spec.layout.block_size, windows=spec.layout.windows)
    longest = spec.scheduler.max_model_len
    blocks = windows.longest(spec.num_pages, spec.scheduler.largest_chunk, most=longest)
    if blocks < longest and worker.num_blocks is not None:
        return SessionLimit(num_tokens=blocks, limit="worker.num_blocks", more="raise worker.num_blocks")
    if blocks < longest:
        more = "give workers more GPUs or memory (--tp, --gpu, worker.memory_fraction)"
        return SessionLimit(num_tokens=blocks, limit="the memory of its GPUs", more=more)
    if worker.max_model_len is not None:
        return SessionLimit(num_tokens=longest, limit="worker.max_model_len", more="raise worker.max_model_len")
    limit = f"worker.max_model_len, of {spec.model}"
    return SessionLimit(num_tokens=longest, limit=limit, more="choose a --model that was made for more")
