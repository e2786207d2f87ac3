"""A simulated deployment as one frozen value. Impossible settings raise Misconfigured, which names the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.config.cluster_config import ClusterConfig, PoolsConfig, SupervisionConfig
from cluster.config.settings import Table, make_config, merge, paths_of, setting
from cluster.simulate.latency.gpus_and_models import gpu_of, model_of
from cluster.simulate.latency.roofline import HOST_S, Roofline, check_fitted
from cluster.simulate.latency.shapes import Gpu, ModelShape, num_blocks
from cluster.simulate.node.simulated_worker import Spec
from cluster.simulate.run.drafters import drafter_of
from cluster.simulate.world.network import NetworkModel
from cluster.simulate.world.simulated_lanes import Cards
from cluster.simulate.world.simulated_load import SessionLimit
from kvtransfer.windows import PageWindows
from protos.errors import Misconfigured
from protos.hints import counted
from protos.values import KVLayout, WorkerRole
from router.router_config import RouterConfig
from router.routing.registry import check_name
from workers.worker_config import SchedulerConfig, TransferConfig, WorkerConfig

VOCAB_SIZE = 32_768
MEMORY_SHARE = 0.9
MAX_HOST_GIB = 16_384  # of one worker
SIMULATED_DTYPES = ("auto", "bfloat16")
CHUNK_BYTES = 128 * 2**20  # copied in a tenth of a millisecond; larger chunks make fewer events
HOST_SHARE = 0.8  # share of PCIe's nominal rate, in copies of whole blocks
GPU_WORKERS: Table = {
    "model": "simulated",
    "worker": {"block_size": 64, "max_num_batched_tokens": 8192, "max_num_seqs": 256, "prefill_chunk": 8192},
}
"""Defaults for large models on GPUs; settings override them."""
WITHOUT_EFFECT = frozenset({
    "model", "host", "port", "processes", "grpc_port", "served_name", "discovery", "lanes", "ray", "tls", "peers",
    "supervision.grace_s", "worker.device", "worker.cuda_graphs", "worker.bind_cores", "router.shadow_policy",
    "router.tenants", "router.http.max_body_bytes", "router.http.keep_alive_s", "router.http.cors_origins",
    "router.http.hosts", "router.dispatch.canary_every", "router.text.tool_parser",
    "router.text.disable_any_whitespace", "router.text.reasoning_parser", "router.text.chat_template",
    "router.text.pooling",
})  # fmt: skip


def simulated_router(policy: str = "prefix_aware", **settings: Any) -> RouterConfig:
    return RouterConfig(model_path=Path("simulated"), model_name="simulated", policy=policy, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """- workers of a role have `specs`, else `spec`, and the GPUs of `pools`, else `num_gpus`
    - `load_s`: from a worker's launch until it serves
    - `audit_every`: events between two checks of all invariants; 0: only at the end
    - `patience_s`: a request without progress for this long is stuck
    - `shared_index`: the gateways have a Redis
    """

    pools: PoolsConfig
    spec: Spec
    specs: Mapping[WorkerRole, Spec] = field(default_factory=dict)
    router: RouterConfig = field(default_factory=simulated_router)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    wire: NetworkModel = field(default_factory=NetworkModel)
    cards: Cards = field(default_factory=Cards)
    num_gateways: int = 1
    shared_index: bool = False
    num_gpus: int = 1
    usd_per_gpu_hour: float = 0.0
    load_s: float = 5.0
    max_skew_s: float = 0.0
    audit_every: int = 0
    patience_s: float = 600.0
    max_ttft_s: float | None = None
    seed: int = 0

    def spec_of(self, role: WorkerRole) -> Spec:
        return self.specs.get(role, self.spec)

    def gpus_of(self, role: WorkerRole) -> int:
        return self.pools.tp(role, self.num_gpus)

    def gpus_by_worker(self) -> dict[str, int]:
        return {worker: self.gpus_of(WorkerRole(worker.rpartition("-")[0])) for worker in self.pools.worker_ids()}


def read_settings(*texts: str) -> ClusterConfig:
    """Parses settings such as worker.block_size=16. Raises Misconfigured."""
    tables: Table = {}
    for text in texts:
        tables = merge(tables, setting(text))
    return settings_of(tables)


def settings_of(tables: Table) -> ClusterConfig:
    """Raises Misconfigured, also for a dtype whose memory simulated models do not model."""
    config = make_config(merge(GPU_WORKERS, tables))
    check_name(config.router.policy)
    if config.worker.dtype not in SIMULATED_DTYPES:
        raise Misconfigured(
            f"worker.dtype = {config.worker.dtype!r}: simulated KV is bfloat16, and weights are no larger, so "
            "sizes would not be yours: leave it out",
            param="worker.dtype",
        )
    return config


def without_effect(tables: Table) -> list[str]:
    return [path for path, _ in paths_of(tables) if any(f"{path}.".startswith(f"{name}.") for name in WITHOUT_EFFECT)]


def gateways_text(num: int) -> str:
    return f", {num:,} gateways" if num > 1 else ""


def hardware_spec(
    *,
    gpu: str,
    model: str,
    tp: int,
    dtype: str | None = None,
    settings: ClusterConfig | None = None,
    leaping: bool = True,
    key: str = "tp",
    acceptance: Sequence[float] = (),
) -> Spec:
    """Workers of `tp` GPUs, with the KV cache that fits beside weights of `dtype`. `key` of [cluster] has `tp`. Raises
    Misconfigured."""
    settings = settings or read_settings()
    worker = settings.worker
    card = gpu_of(gpu)
    shape = _shape(model, dtype, worker)
    check_fitted(gpu, card, model, shape)
    _check_ranks(model, shape, tp, key)
    drafter = drafter_of(worker, acceptance, shape, lambda drafting: Roofline(gpu=card, model=drafting, tp=tp))
    usual_depth = 0 if drafter is not None and drafter.latency is not None else 1
    depth = usual_depth if worker.steps_in_flight is None else worker.steps_in_flight
    layout = shape.layout(worker.block_size)
    return Spec(
        model=model,
        layout=layout,
        num_blocks=_num_blocks(worker, card, shape, tp),
        scheduler=SchedulerConfig(
            max_model_len=worker.max_model_len or shape.max_len,
            vocab_size=VOCAB_SIZE,
            **worker.step_limits(),
        ),
        latency=Roofline(gpu=card, model=shape, tp=tp, host_s=0.0 if depth or drafter is not None else HOST_S),
        prefill=TransferConfig(chunk_bytes=CHUNK_BYTES),
        decode=TransferConfig(),
        depth=depth,
        leaping=leaping,
        host_blocks=_host_blocks(worker, layout),
        host_bytes_per_s=card.host_rate * tp * HOST_SHARE,
        shares=shape.window_shares,
        drafter=drafter,
    )


def _host_blocks(worker: WorkerConfig, layout: KVLayout) -> int:
    """Raises Misconfigured."""
    num = int(min(worker.host_kv_gib, MAX_HOST_GIB + 1) * 2**30) // layout.stored_bytes
    if worker.host_kv_gib > MAX_HOST_GIB or (worker.host_kv_gib and not num):
        raise Misconfigured(
            f"worker.host_kv_gib = {worker.host_kv_gib:g}: give 0, or from the {layout.stored_bytes / 2**30:.4f} GiB "
            f"of a block to {MAX_HOST_GIB:,}",
            param="worker.host_kv_gib",
        )
    return num


def _shape(model: str, dtype: str | None, worker: WorkerConfig) -> ModelShape:
    """Raises Misconfigured."""
    shape = model_of(model, dtype, whole_experts=worker.expert_parallel)
    return replace(shape, kv_dtype=worker.kv_dtype, free_windows=worker.free_windows)


def _check_ranks(model: str, shape: ModelShape, tp: int, key: str) -> None:
    """Raises Misconfigured for a number of GPUs that heads cannot be divided by."""
    if not shape.splits(tp):
        possible = ", ".join(str(num) for num in range(1, shape.heads + 1) if shape.splits(num))
        raise Misconfigured(
            f"cluster.{key} = {tp}: it must divide the {shape.heads} heads of {model}, and divide its "
            f"{shape.kv_heads} key/value heads or be a multiple of them: give one of {possible}",
            param=f"cluster.{key}",
        )


def _num_blocks(worker: WorkerConfig, card: Gpu, shape: ModelShape, tp: int) -> int:
    """Raises Misconfigured."""
    num, share = worker.num_blocks, worker.memory_fraction or MEMORY_SHARE
    most = num_blocks(card, shape, tp=tp, block_size=worker.block_size, memory_share=share)
    if num is None or num <= most:
        return most if num is None else num
    need = shape.stored_bytes(tp, worker.block_size) * num / 1e9
    raise Misconfigured(
        f"worker.num_blocks = {num:,}: they need {need:,.0f} GB, and beside the weights is room for "
        f"{counted(most, 'block')} in {share:g} (worker.memory_fraction) of the memory of {counted(tp, 'GPU')}: give "
        f"at most {most:,}, give more GPUs, or leave it out",
        param="worker.num_blocks",
    )


def room_of(spec: Spec, worker: WorkerConfig) -> SessionLimit:
    windows = PageWindows(block_size=spec.layout.block_size, windows=spec.layout.windows)
    longest = spec.scheduler.max_model_len
    blocks = windows.longest(spec.num_pages, spec.scheduler.largest_chunk, most=longest)
    if blocks < longest:
        memory = "memory: cluster.tp, hardware.gpu and worker.memory_fraction"
        return SessionLimit(num_tokens=blocks, limit=memory if worker.num_blocks is None else "worker.num_blocks")
    of_model = "" if worker.max_model_len is not None else f", of {spec.model}"
    return SessionLimit(num_tokens=longest, limit=f"worker.max_model_len{of_model}")
