"""Checks before anything starts: settings with which no start can succeed, such as ranks that cannot share the model,
or workers that do not fit into memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.config.cluster_config import ClusterConfig
from protos.errors import Misconfigured
from protos.values import ITEM_BYTES, KVLayout, WorkerRole
from router.auth.tenants import read_roster
from router.observe.ledger.prices import NO_PRICES, read_prices
from workers.adapters.adapter_files import check_folder
from workers.adapters.names import parse_adapters
from workers.free_memory import RANK_BYTES, free_ram_bytes
from workers.models.interface import ServedConfig
from workers.models.model_config import longest_sequence, weight_bytes
from workers.models.served import check_ranks, layout_of, read_served
from workers.speculation.ranks.draft_needs import DraftNeeds, needs_of
from workers.weights.registry import stored_tensors

log = logging.getLogger("baton.cluster")

_GIB = 2**30
_GPUS = Path("/dev")


def check_feasible(
    config: ClusterConfig, *, free_bytes: Callable[[], int] = free_ram_bytes, devices: Path = _GPUS
) -> None:
    """Raises Misconfigured with the setting and a value that works; BadCheckpoint or UnsupportedModel for a model that
    cannot be served. Machines of an existing Ray are not checked."""
    model = read_served(config.worker.model, config.worker.quantize)
    if not config.pools.colocated and config.pools.prefill == 0:
        log.warning(
            "pools.prefill is 0: decode workers prefill their prompts themselves, which delays running answers. "
            "Give 1 or more; if intended, use --workers %d",
            config.pools.counts()[WorkerRole.DECODE],
        )
    for role, count in config.pools.counts().items():
        tp = config.pools.tp(role, config.worker.tp)
        if count:
            setting = "worker.tp" if tp == config.worker.tp else f"pools.{role}_tp"
            check_ranks(model, tp, setting, expert_parallel=config.worker.expert_parallel)
    longest_sequence(model, config.worker.max_model_len)
    _layout(config, model, config.worker.tp)
    if config.ray.address:
        return
    stored_tensors(Path(config.worker.model))
    drafting = needs_of(config.worker, model, _kv_type(config, model))
    _check_host_tier(config, free_bytes())
    has_gpu = any(devices.glob("nvidia[0-9]*"))
    if config.worker.device == "cuda" and not has_gpu:
        raise Misconfigured(
            "worker.device is cuda: this machine has no NVIDIA GPU; --device cpu needs none", param="device"
        )
    if config.worker.device == "cpu" or not has_gpu:
        _check_ram(config, model, drafting, free_bytes())


def check_files(config: ClusterConfig) -> None:
    """Raises Misconfigured for tenants, prices or certificates that cannot be read or parsed, and for budgets without
    prices; BadCheckpoint or UnsupportedModel for adapters."""
    config.tls.check()
    config.peers.check()
    prices = read_prices(Path(config.router.ledger.prices)).prices if config.router.ledger.prices else ()
    if config.router.tenants:
        roster = read_roster(Path(config.router.tenants))
        if not prices and any(tenant.has_budget for tenant in roster.tenants.values()):
            raise Misconfigured(NO_PRICES, param="router.ledger.path")
    _check_adapters(config)


def check_adapter_names(configs: Sequence[ClusterConfig]) -> None:
    """Raises Misconfigured for an adapter with the name or alias of a model, or with the name of another model's
    adapter."""
    models = {one.router.model_name: f"the name of the model {one.router.model_name}" for one in configs}
    for one in configs:
        for alias in map(str.strip, one.router.model_aliases.split(",")):
            models.setdefault(alias, f"an alias of the model {one.router.model_name}")
    owners: dict[str, str] = {}
    for one in configs:
        model = one.router.model_name
        for name in parse_adapters(one.worker.adapters):
            if name in models:
                raise Misconfigured(
                    f"worker.adapters: {name!r} is {models[name]}: give the adapter another one", param="adapters"
                )
            if (owner := owners.setdefault(name, model)) != model:
                raise Misconfigured(
                    f"worker.adapters: the models {owner} and {model} both have an adapter {name!r}: write "
                    f"worker.adapters into the table of one, [models.{owner}.worker]",
                    param="adapters",
                )


def _check_adapters(config: ClusterConfig) -> None:
    """Files on machines of an existing Ray are not checked here."""
    if not config.ray.address:
        for path in parse_adapters(config.worker.adapters).values():
            check_folder(Path(path))


def _check_host_tier(config: ClusterConfig, free: int) -> None:
    each, count = config.worker.host_kv_gib, sum(config.pools.counts().values())
    if each * count * _GIB > free:
        raise Misconfigured(
            f"worker.host_kv_gib is {each:g} for each of {count} workers, {_floored(free):.1f} GiB of memory are free: "
            f"give at most {_floored(free / count):.1f}",
            param="host_kv_gib",
        )


def _floored(num_bytes: float) -> float:
    """Rounds a size in GiB down, so that the printed bound is sufficient."""
    return math.floor(10 * max(0.0, num_bytes) / _GIB) / 10


def _check_ram(config: ClusterConfig, model: ServedConfig, drafting: DraftNeeds, free: int) -> None:
    """Checks certain needs only: processes, weights, and configured blocks."""
    each = {
        role: _worker_bytes(config, model, drafting, config.pools.tp(role, config.worker.tp))
        for role in config.pools.counts()
    }
    needed = sum(each[role] * count for role, count in config.pools.counts().items())
    if needed <= free:
        return
    counts = {role: count for role, count in config.pools.counts().items() if count}
    role = max(counts, key=lambda role: each[role] * counts[role])
    others = needed - each[role] * counts[role]
    possible = max(0, free - others) // each[role]
    fewer = f"at most {possible} {role}" if possible else "fewer or smaller workers"
    wanted = " + ".join(f"{count} {name}" for name, count in counts.items())
    raise Misconfigured(
        f"{wanted} workers take {needed / _GIB:.1f} GiB of memory at the least ({each[role] / _GIB:.2f} GiB each), "
        f"{free / _GIB:.1f} GiB are free: ask for {fewer}, a smaller model, or more machines (--ray-address)",
        param=f"pools.{role}",
    )


def _worker_bytes(config: ClusterConfig, model: ServedConfig, drafting: DraftNeeds, tp: int) -> int:
    """Bytes of a worker on a CPU, over all ranks, with its proposers."""
    worker = config.worker
    layout = _layout(config, model, tp)
    weights = weight_bytes(worker.model, _dtype(config, model), worker.quantize)
    block_bytes = layout.block_bytes + drafting.block_bytes
    return tp * RANK_BYTES + weights + drafting.weight_bytes + (worker.num_blocks or 0) * block_bytes


def _dtype(config: ClusterConfig, model: ServedConfig) -> str:
    return model.dtype if config.worker.dtype == "auto" else config.worker.dtype


def _layout(config: ClusterConfig, model: ServedConfig, tp: int) -> KVLayout:
    """Raises Misconfigured or UnsupportedModel for a `kv_dtype` that the model cannot have."""
    worker = config.worker
    return layout_of(model, worker.kv_dtype, block_size=worker.block_size, dtype=_kv_type(config, model), tp=tp)


def _kv_type(config: ClusterConfig, model: ServedConfig) -> str:
    dtype = _dtype(config, model)
    return dtype if dtype in ITEM_BYTES else "bfloat16"
