"""Builds one rank of a worker from its settings, then, on rank 0, the engine.

config ── open_rank ──▶ LoadedRank on every rank ─┬─ rank 0: build_engine(rank, make_role) ──▶ Engine
                                            └─ others: follow_rank0(rank, transfer), until rank 0 stops or is lost
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvtransfer.events import EventLog
from kvtransfer.reshard import heads_of, rank_block_bytes
from protos.errors import Misconfigured
from protos.model_files.opening import model_name, open_model
from protos.values import KVLayout, SamplingParams
from workers.attention.registry import attention_for
from workers.batch import Batch, Row, Sample
from workers.checkpoint.kv_scales import read_kv_scales
from workers.config import SchedulerConfig, WorkerConfig
from workers.engine.engine import Engine
from workers.engine.expert_load import ExpertLoad
from workers.grammar.base import Grammars
from workers.grammar.guidance import GuidanceGrammars
from workers.kernels.base import KVScales
from workers.kernels.cpu.memory import keep_freed_memory
from workers.kv.blocks import BlockPool
from workers.kv.capacity import blocks_in_ram, blocks_on_gpu, check_weights_fit
from workers.kv.groups import with_windows
from workers.kv.host import HostCopies, HostPool
from workers.kv.host_copies import host_copies, staging_bytes
from workers.kv.kinds import FP8, layout_of
from workers.kv.storage import KVStorage
from workers.kv.windows import PageWindows
from workers.memory import free_ram_bytes
from workers.models.config import ModelConfig, check_parallel, longest_sequence, read_config, weight_bytes
from workers.models.decoder import Decoder
from workers.models.loader import Progress, load_model
from workers.parallel.group import TensorParallel
from workers.parallel.ranks import Leader, LeadingRunner, follow
from workers.runner.cuda_graphs import CudaRecorder, why_eager
from workers.runner.runner import TorchRunner
from workers.scheduling.role import Role
from workers.scheduling.scheduler import Scheduler
from workers.timeline import Timeline
from workers.transfer.rank_transfer import RankTransfer

log = logging.getLogger("baton.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRank:
    """One rank of a worker with its weights and its share of the cache. `scheduler` holds what was resolved from the
    settings and the checkpoint: the same on all ranks, as are `storage.num_blocks` and `num_slots`, the blocks that the
    host tier keeps."""

    model: ModelConfig
    name: str
    layout: KVLayout
    device: str
    scheduler: SchedulerConfig
    group: TensorParallel
    storage: KVStorage
    runner: TorchRunner
    steps_in_flight: int
    weights: str = ""  # their encoding and bits, for people
    grammars: Grammars | None = None
    num_slots: int = 0
    copies: HostCopies | None = None
    expert_imbalance: ExpertLoad | None = None


def device_of(config: WorkerConfig) -> str:
    """ "cuda" or "cpu". Raises Misconfigured if CUDA is requested and there is none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise Misconfigured(
            "worker.device is 'cuda', but torch sees no GPU: use device 'cpu' or 'auto'", param="device"
        )
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def dtype_of(config: WorkerConfig, model: ModelConfig) -> str:
    """`worker.dtype`; with "auto" the checkpoint's own, bfloat16 in place of float16."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if model.dtype == "float32" else "bfloat16"


def steps_in_flight_of(config: WorkerConfig) -> int:
    """How many steps are launched ahead: 1 where a device computes beside the host, 0 where they share their cores
    (docs/adr/0010)."""
    if config.steps_in_flight is not None:
        return config.steps_in_flight
    return 1 if device_of(config) == "cuda" else 0


def open_rank(config: WorkerConfig, group: TensorParallel, *, on_progress: Progress | None = None) -> LoadedRank:
    """Reads the checkpoint and makes the cache; every rank of a worker calls it at the same time.

    Raises BadCheckpoint, UnsupportedModel or Misconfigured (also when the model or one block does not fit into the
    memory), and WorkerLost when another rank fails to do the same. The group is closed then.
    """
    try:
        return _open_rank(config, group, on_progress)
    except BaseException:
        group.close()
        raise


def build_engine(
    rank: LoadedRank,
    leader: Leader,
    make_role: Callable[[BlockPool], Role],
    *,
    incarnation: int,
    clock: Callable[[], float],
) -> Engine:
    """The engine of a worker, on rank 0. `make_role` is called once, with the pool that the engine will use."""
    events = EventLog(incarnation)
    host = None
    if rank.copies is not None:
        copies = leader.everywhere(rank.copies)
        block_bytes = rank_block_bytes(rank.layout) * rank.layout.tp
        host = HostPool(rank.num_slots, copies, events.record, block_bytes=block_bytes)
    pool = BlockPool(
        rank.storage.num_blocks, rank.layout.block_size, events.record, host=host, windows=rank.layout.windows
    )
    scheduler = Scheduler(rank.scheduler, pool, make_role(pool), prefix_key=rank.model.prefix_key)
    runner = LeadingRunner(leader, rank.runner)
    timeline = Timeline(clock)
    rank.runner.record(timeline)
    return Engine(
        scheduler,
        runner,
        events=events,
        clock=clock,
        depth=rank.steps_in_flight,
        timeline=timeline,
        grammars=rank.grammars,
        expert_imbalance=rank.expert_imbalance,
    )


def make_transfer(rank: LoadedRank, **ends: Any) -> RankTransfer[torch.Tensor]:
    """This rank's half of KV transfer; `ends` are RankTransfer's `sender` and `receiver`."""
    transfer = RankTransfer(
        rank.storage,
        rank.layout,
        rank=rank.group.rank,
        least=rank.group.least,
        aside=rank.storage.aside,
        rejoin=rank.storage.rejoin,
        mark=rank.storage.mark,
        follows_layers=True,
        **ends,
    )
    rank.runner.watch(transfer.after_layer)
    return transfer


def follow_rank0(rank: LoadedRank, transfer: RankTransfer[torch.Tensor]) -> None:
    """Does what rank 0 does, on every other rank, until rank 0 stops. Closes the transfer.

    Raises WorkerLost when a rank is gone, and any error of this rank's operations.
    """
    try:
        follow(rank.group, (rank.runner, rank.copies, transfer), after_each=transfer.poll)
    finally:
        transfer.close()


def _open_rank(config: WorkerConfig, group: TensorParallel, on_progress: Progress | None) -> LoadedRank:
    assert group.size == config.tp, f"a group of {group.size} ranks for tp {config.tp}"
    device = device_of(config)
    steps_in_flight = steps_in_flight_of(config)
    model = read_config(config.model, config.quantize)
    check_parallel(model, config.tp, expert_parallel=config.expert_parallel)
    name = config.served_name or model_name(config.model)
    dtype = dtype_of(config, model)
    layout = _layout(config, model, name, device, dtype)
    fp8_scales = _fp8_scales(config, layout, group.rank)
    max_model_len = longest_sequence(model, config.max_model_len)
    decoder = _load(config, group, device, dtype, on_progress)
    free_bytes = group.least([free_ram_bytes()])[0]  # read on all ranks before any of them allocates
    num_slots = _num_slots(config, layout, free_bytes)
    free_bytes -= num_slots * rank_block_bytes(layout) * layout.tp
    num_blocks = _num_blocks(config, group, decoder, layout, device, max_model_len, free_bytes // layout.tp)
    storage = _make_storage(layout, num_blocks, device, free_bytes // layout.tp, fp8_scales)
    windows = PageWindows(block_size=config.block_size, windows=layout.windows)
    capacity = windows.longest(storage.num_blocks, config.largest_chunk, most=max_model_len)
    if capacity < max_model_len:
        if config.max_model_len is not None:
            raise Misconfigured(
                f"worker.max_model_len is {max_model_len}, the KV cache holds {capacity} tokens: lower max_model_len "
                f"to {capacity} or less, or raise num_blocks or memory_fraction",
                param="max_model_len",
            )
        log.warning("max_model_len is lowered from %d to %d: more does not fit the KV cache", max_model_len, capacity)
    grammars = _grammars(config, model) if group.rank == 0 else None
    runner = TorchRunner(
        decoder,
        attention_for(storage),
        block_size=config.block_size,
        shares_tokens=steps_in_flight > 0,
        grammars=grammars,
    )
    if device == "cuda":
        num_blocks = -(-min(max_model_len, capacity) // config.block_size)
        _capture(config, runner, decoder, max_blocks=num_blocks, num_groups=len(layout.groups))
    return LoadedRank(
        model=model,
        name=name,
        layout=layout,
        device=device,
        scheduler=_scheduler_config(config, model, min(max_model_len, capacity)),
        group=group,
        storage=storage,
        runner=runner,
        steps_in_flight=steps_in_flight,
        weights=decoder.stored_as,
        grammars=grammars,
        num_slots=num_slots,
        copies=host_copies(storage, num_slots) if num_slots else None,
        expert_imbalance=ExpertLoad(counts) if (counts := decoder.expert_counts()) else None,
    )


def _layout(config: WorkerConfig, model: ModelConfig, name: str, device: str, dtype: str) -> KVLayout:
    """Raises Misconfigured or UnsupportedModel for a `kv_dtype` that this model or this worker cannot have."""
    layout = layout_of(model, config.kv_dtype, block_size=config.block_size, dtype=dtype, tp=config.tp)
    layout = replace(layout, model=name, device=device)
    if config.free_windows:
        layout = _freeing(config, model, layout)
    if device == "cuda" and config.kv_dtype != "auto":
        raise Misconfigured(
            f"worker.kv_dtype is {config.kv_dtype}: GPUs cache keys and values in the dtype of the weights: leave it "
            "out, or use --device cpu",
            param="kv_dtype",
        )
    return layout


def _freeing(config: WorkerConfig, model: ModelConfig, layout: KVLayout) -> KVLayout:
    """`layout` with groups that free what lies behind their windows, if the model has any and nothing forbids it."""
    freeing = with_windows(layout, model.windows)
    if not freeing.frees_blocks:
        return layout
    if config.host_kv_gib:
        log.warning(
            "KV behind sliding windows is kept: the host tier keeps whole blocks only (host_kv_gib is %g)",
            config.host_kv_gib,
        )
        return layout
    log.info(
        "KV behind sliding windows is freed, in %d groups of layers; it is neither pulled nor migrated, unless "
        "worker.free_windows is false",
        len(freeing.groups),
    )
    return freeing


def _fp8_scales(config: WorkerConfig, layout: KVLayout, rank: int) -> Mapping[int, KVScales]:
    if layout.kv_dtype != FP8:
        return {}
    scales = read_kv_scales(
        config.model,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        heads=heads_of(layout, rank),
    )
    if missing := layout.num_layers - len(scales):
        log.warning(
            "kv_dtype is fp8, and %s has no scales for keys and values of %d of %d layers: they are rounded with scale "
            "1, which can cost accuracy; kv_dtype int8 needs none",
            config.model, missing, layout.num_layers,
        )  # fmt: skip
    return scales


def _num_slots(config: WorkerConfig, layout: KVLayout, free_bytes: int) -> int:
    """Blocks of the host tier: as many as fit into `host_kv_gib`, with all ranks' shares. Raises Misconfigured if that
    exceeds the free RAM."""
    block_bytes = rank_block_bytes(layout) * layout.tp
    num_slots = int(config.host_kv_gib * 2**30) // block_bytes
    if config.host_kv_gib and not num_slots:
        raise Misconfigured(
            f"worker.host_kv_gib is {config.host_kv_gib:g}, and a block takes {block_bytes / 2**30:.4f} GiB: raise it, "
            f"or give 0 to keep nothing on the host",
            param="host_kv_gib",
        )
    if num_slots * block_bytes > free_bytes:
        raise Misconfigured(
            f"worker.host_kv_gib is {config.host_kv_gib:g}, more than the {free_bytes / 2**30:.2f} GiB of memory that "
            f"are free: lower it",
            param="host_kv_gib",
        )
    return num_slots


def _grammars(config: WorkerConfig, model: ModelConfig) -> Grammars:
    """Of rank 0, which samples."""
    return GuidanceGrammars(open_model(config.model), vocab_size=model.vocab_size, eos_ids=model.eos_token_ids)


def _capture(config: WorkerConfig, runner: TorchRunner, decoder: Decoder, *, max_blocks: int, num_groups: int) -> None:
    reason = why_eager(decoder) if config.cuda_graphs else "cuda_graphs is off"
    if reason:
        log.warning("decode steps run without CUDA graphs: %s", reason)
    else:
        runner.capture(CudaRecorder(), max_rows=config.max_num_seqs, max_blocks=max_blocks, num_groups=num_groups)


def _scheduler_config(config: WorkerConfig, model: ModelConfig, max_model_len: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_token_ids,
        **config.step_limits(),
    )


def _load(
    config: WorkerConfig, group: TensorParallel, device: str, dtype: str, on_progress: Progress | None
) -> Decoder:
    if device == "cpu":
        num_bytes = weight_bytes(config.model, dtype, config.quantize)
        check_weights_fit(num_bytes // config.tp, free_ram_bytes(), device)
    try:
        decoder = load_model(
            config.model,
            device=device,
            dtype=dtype,
            quantize=config.quantize,
            parallel=group,
            expert_parallel=config.expert_parallel,
            on_progress=on_progress,
        )
        decoder.pack()
        if device == "cpu":
            keep_freed_memory()
        return decoder
    except torch.OutOfMemoryError as error:
        raise Misconfigured(
            f"{config.model} does not fit into the GPU's memory: raise tp or choose a smaller model", param="model"
        ) from error


def _num_blocks(
    config: WorkerConfig,
    group: TensorParallel,
    decoder: Decoder,
    layout: KVLayout,
    device: str,
    max_model_len: int,
    free_bytes: int,
) -> int:
    """The same on all ranks: the least that any of them can hold. `free_bytes` is a rank's share of the RAM."""
    if config.num_blocks is not None:
        return config.num_blocks
    block_bytes = rank_block_bytes(layout)
    if device == "cpu":
        mine = blocks_in_ram(
            block_bytes,
            fraction=config.memory_fraction,
            free_bytes=free_bytes,
            max_useful=_most_useful(config, layout, max_model_len),
        )
    else:
        storage = KVStorage(layout, num_blocks=1, device=device)
        runner = TorchRunner(decoder, attention_for(storage), block_size=config.block_size)
        batch = largest_batch(config, max_model_len, len(layout.groups))
        mine = blocks_on_gpu(
            block_bytes,
            fraction=config.memory_fraction,
            device=device,
            largest_step=lambda: runner.run(batch),
            beside_bytes=staging_bytes(block_bytes) if config.host_kv_gib else 0,
        )
    return int(group.all_gather(torch.tensor([mine], device=device)).min().item())


def _most_useful(config: WorkerConfig, layout: KVLayout, max_model_len: int) -> int:
    """Blocks that `max_num_seqs` of the longest sequences hold."""
    windows = PageWindows(block_size=config.block_size, windows=layout.windows)
    return -(-config.max_num_seqs * windows.num_held(max_model_len, config.largest_chunk) // len(layout.groups))


def _make_storage(
    layout: KVLayout, num_blocks: int, device: str, free_bytes: int, fp8_scales: Mapping[int, KVScales]
) -> KVStorage:
    """With a page of each group for each block."""
    num_bytes = num_blocks * rank_block_bytes(layout)
    too_much = Misconfigured(
        f"a KV cache of {num_blocks} blocks takes {num_bytes / 2**30:.2f} GiB on each rank, more than there is on "
        f"{device}: lower num_blocks, memory_fraction or host_kv_gib",
        param="num_blocks",
    )
    if device == "cpu" and num_bytes > free_bytes:  # Linux would allocate it, and kill the process when it is used
        raise too_much
    try:
        return KVStorage(layout, num_blocks=num_blocks * len(layout.groups), device=device, fp8_scales=fp8_scales)
    except torch.OutOfMemoryError as error:
        raise too_much from error


def largest_batch(config: WorkerConfig, max_model_len: int, num_groups: int = 1) -> Batch:
    """The largest step that the scheduler can plan: it ends the longest contexts and has the costliest sampling. It
    only measures memory, so all rows use block 0."""
    sample = Sample(params=SamplingParams(top_p=0.9, logprobs=0), index=0)
    rows: list[Row] = []
    budget = config.max_num_batched_tokens
    while budget > 0 and len(rows) < config.max_num_seqs:
        others = config.max_num_seqs - len(rows) - 1
        num_tokens = max(1, min(config.prefill_chunk, max_model_len, budget - others))
        rows.append(
            Row(
                request_id=str(len(rows)),
                token_ids=(0,) * num_tokens,
                start=max_model_len - num_tokens,
                block_tables=((0,) * -(-max_model_len // config.block_size),) * num_groups,
                sample=sample,
                prompt_len=max_model_len,
            )
        )
        budget -= num_tokens
    return Batch(rows=tuple(rows))
