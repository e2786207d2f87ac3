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
from kvtransfer.windows import PageWindows
from protos.errors import Misconfigured
from protos.model_files.opening import model_name, open_model
from protos.values import KVLayout
from workers.adapters.linear import AdapterTable
from workers.attention.cpu import has_same_bits
from workers.attention.registry import attention_for
from workers.cache import bytes_beside, make_storage, num_blocks_of, num_host_blocks_of, with_head
from workers.engine.engine import Engine
from workers.engine.expert_load import ExpertLoad, expert_load
from workers.engine.served_adapters import ServedAdapters
from workers.free_memory import free_ram_bytes
from workers.grammar.grammar_seam import Grammars
from workers.grammar.guidance import GuidanceGrammars
from workers.kernels.cpu.regions import keep_freed_memory
from workers.kernels.device_kernels import KVScales
from workers.kv.block_pool import BlockPool
from workers.kv.cache_size import check_weights_fit
from workers.kv.groups import with_windows
from workers.kv.host import HostCopies, HostPool
from workers.kv.host_copies import host_copies
from workers.kv.kinds import FP8
from workers.kv.kv_storage import KVStorage
from workers.models.decoder import Decoder
from workers.models.filling import Progress
from workers.models.interface import ServedConfig, ServedDecoder
from workers.models.model_config import longest_sequence, weight_bytes
from workers.models.served import check_ranks, layout_of, load_served, read_served
from workers.parallel.group import TensorParallel
from workers.parallel.ranks import Leader, LeadingRunner, follow
from workers.runner.cuda_graphs import CudaRecorder, why_eager
from workers.runner.torch_runner import TorchRunner
from workers.scheduling.role import Role
from workers.scheduling.scheduler import Scheduler
from workers.speculation.ranks.draft_cache import Drafting
from workers.speculation.ranks.draft_opening import open_drafting
from workers.speculation.registry import AUTO, SpeculateMode, speculation_of
from workers.speculation.speculation import Speculation
from workers.timeline import Timeline
from workers.transfer.rank_transfer import RankTransfer
from workers.weights.kv_scales import read_kv_scales
from workers.worker_config import SchedulerConfig, WorkerConfig

log = logging.getLogger("baton.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRank:
    """A rank of a worker, with its weights and share of the cache. `scheduler`: settings resolved with the checkpoint.
    These, `storage.num_blocks` and `num_slots` (blocks of the host tier) are equal on all ranks."""

    model: ServedConfig
    name: str
    layout: KVLayout
    device: str
    scheduler: SchedulerConfig
    group: TensorParallel
    storage: KVStorage
    runner: TorchRunner
    steps_in_flight: int
    weights: str = ""  # their encoding and bits, for people
    dtype: str = ""
    grammars: Grammars | None = None
    num_slots: int = 0
    copies: HostCopies | None = None
    expert_imbalance: ExpertLoad | None = None
    speculation: Speculation | None = None
    drafting: Drafting | None = None
    adapters: AdapterTable | None = None


def device_of(config: WorkerConfig) -> str:
    """ "cuda" or "cpu". Raises Misconfigured if CUDA is requested and there is none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise Misconfigured("worker.device = 'cuda', and torch sees no GPU: give 'cpu' or 'auto'", param="device")
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def dtype_of(config: WorkerConfig, model: ServedConfig) -> str:
    """`worker.dtype`; with "auto" the checkpoint's own, bfloat16 in place of float16."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if model.dtype == "float32" else "bfloat16"


def steps_in_flight_of(config: WorkerConfig) -> int:
    """Returns how many steps are launched ahead: 1 on a GPU; 0 on a CPU, where steps share its cores (docs/adr/0010),
    and with a draft model or head, which needs known tokens. Raises Misconfigured for steps ahead with a draft model or
    head."""
    mode = SpeculateMode.of(config.speculate)
    if config.steps_in_flight and mode.is_by_model:
        why = (
            "a head reads hidden states of the last step, which the next one overwrites"
            if mode.is_head
            else "a draft model computes after the last known token, which a step in flight has not brought"
        )
        raise Misconfigured(
            f"worker.steps_in_flight = {config.steps_in_flight} with speculate = {config.speculate}: {why}: give 0",
            param="steps_in_flight",
        )
    if config.steps_in_flight is not None:
        return config.steps_in_flight
    if mode.is_by_model:
        return 0
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
        num_groups = len(rank.layout.groups)
        host = HostPool(rank.num_slots, copies, events.record, block_bytes=block_bytes, num_groups=num_groups)
    pool = BlockPool(
        rank.storage.num_blocks, rank.layout.block_size, events.record, host=host, windows=rank.layout.windows
    )
    pool.head_stays = rank.drafting is not None and rank.drafting.kv_head is not None and rank.layout.head is None
    if rank.drafting is not None and rank.speculation is not None:
        rank.speculation.add(rank.drafting.proposer(leader, pool.headless))
    scheduler = Scheduler(
        rank.scheduler, pool, make_role(pool), prefix_key=rank.model.prefix_key, speculation=rank.speculation
    )
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
        adapters=ServedAdapters(leader.everywhere(rank.adapters), rank.name) if rank.adapters is not None else None,
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
    """Repeats rank 0's operations on another rank until rank 0 stops. Closes the transfer. Raises WorkerLost when a
    rank is gone, and any error of this rank's operations."""
    try:
        parts = rank.runner, rank.copies, rank.adapters, transfer, rank.drafting
        follow(rank.group, parts, after_each=transfer.poll)
    finally:
        transfer.close()


def _open_rank(config: WorkerConfig, group: TensorParallel, on_progress: Progress | None) -> LoadedRank:
    assert group.size == config.tp, f"a group of {group.size} ranks for tp {config.tp}"
    device = device_of(config)
    steps_in_flight = steps_in_flight_of(config)
    model = read_served(config.model, config.quantize)
    check_ranks(model, config.tp, expert_parallel=config.expert_parallel)
    name = config.served_name or model_name(config.model)
    layout = _layout(config, model, name, device, dtype := dtype_of(config, model))
    fp8_scales = _fp8_scales(config, layout, group.rank)
    max_model_len = longest_sequence(model, config.max_model_len)
    decoder = _load(config, group, device, dtype, on_progress)
    drafting = _open_drafting(config, decoder, group, device)
    layout = with_head(layout, drafting)
    free_bytes = group.least([free_ram_bytes()])[0]  # read on all ranks before any of them allocates
    num_host_blocks = num_host_blocks_of(config, layout, free_bytes)
    num_slots = num_host_blocks * len(layout.groups)
    free_bytes -= num_host_blocks * rank_block_bytes(layout) * layout.tp
    cache = drafting.cache if drafting is not None else None
    free_bytes = free_bytes // layout.tp - (cache.scratch_bytes if cache is not None else 0)
    beside = bytes_beside(layout, drafting)
    num_blocks = num_blocks_of(config, group, decoder, layout, device, max_model_len, free_bytes, beside)
    storage = make_storage(layout, num_blocks, device, free_bytes, fp8_scales, drafting)
    capacity = _capacity(config, storage, max_model_len)
    grammars = _grammars(config, model) if group.rank == 0 else None
    runner = TorchRunner(
        decoder,
        attention_for(storage),
        block_size=config.block_size,
        shares_tokens=steps_in_flight > 0,
        grammars=grammars,
    )
    if drafting is not None and drafting.hidden_layers:
        runner.keep_hidden(drafting.hidden_layers)
        drafting.hidden = runner
    if device == "cuda":
        max_tokens = min(config.max_num_batched_tokens, max_model_len, capacity)
        storage.warm()
        runner.warm(max_tokens=max_tokens, max_rows=config.max_num_seqs, num_groups=len(layout.groups))
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
        dtype=dtype,
        grammars=grammars,
        num_slots=num_slots,
        copies=host_copies(storage, num_slots) if num_slots else None,
        expert_imbalance=expert_load(decoder.expert_counts(), config.tp if config.expert_parallel else 1),
        speculation=_speculation(config, decoder, storage) if group.rank == 0 else None,
        drafting=drafting,
        adapters=AdapterTable(decoder, max_adapters=config.max_adapters),
    )


def _open_drafting(config: WorkerConfig, decoder: ServedDecoder, group: TensorParallel, device: str) -> Drafting | None:
    try:
        return open_drafting(config, decoder, group, device)
    except torch.OutOfMemoryError as error:
        raise Misconfigured(
            f"worker.speculate = {config.speculate} does not fit into the GPU's memory beside the model: raise tp, or "
            "give ngram or suffix",
            param="speculate",
        ) from error


def _capacity(config: WorkerConfig, storage: KVStorage, max_model_len: int) -> int:
    """Tokens of the longest sequence that the cache holds. Raises Misconfigured if the setting is longer."""
    windows = PageWindows(block_size=config.block_size, windows=storage.layout.windows)
    capacity = windows.longest(storage.num_blocks, config.largest_chunk, most=max_model_len)
    if capacity < max_model_len:
        if config.max_model_len is not None:
            raise Misconfigured(
                f"worker.max_model_len = {max_model_len}: the KV cache holds {capacity} tokens: lower it, or raise "
                "num_blocks or memory_fraction",
                param="max_model_len",
            )
        log.warning("max_model_len is lowered from %d to %d: more does not fit the KV cache", max_model_len, capacity)
    return capacity


def _speculation(config: WorkerConfig, decoder: ServedDecoder, storage: KVStorage) -> Speculation | None:
    """Rank 0's speculation. "auto" speculates where a verified token has the bits of a decoded one
    (docs/speculation.md)."""
    if config.speculate == AUTO and not (isinstance(decoder, Decoder) and has_same_bits(attention_for(storage))):
        log.info("worker.speculate is auto, and off here: only compiled CPU kernels give a draft's row the same bits")
        return None
    max_bytes = int(config.speculation_mib * 2**20)
    return speculation_of(config.speculate, max_drafts=config.max_drafts, max_bytes=max_bytes)


def _layout(config: WorkerConfig, model: ServedConfig, name: str, device: str, dtype: str) -> KVLayout:
    """Raises Misconfigured or UnsupportedModel for a `kv_dtype` that this model cannot have."""
    layout = layout_of(model, config.kv_dtype, block_size=config.block_size, dtype=dtype, tp=config.tp)
    of_revision = f"{name} at revision {config.revision}" if config.revision else name
    layout = replace(layout, model=of_revision, device=device)
    if config.free_windows:
        layout = _freeing(config, model, layout)
    return layout


def _freeing(config: WorkerConfig, model: ServedConfig, layout: KVLayout) -> KVLayout:
    freeing = with_windows(layout, model.windows)
    if not freeing.frees_blocks:
        return layout
    if SpeculateMode.of(config.speculate).is_by_model:
        log.warning(
            "KV behind sliding windows is kept: drafts by a model need every block (speculate is %s)", config.speculate
        )
        return layout
    log.info("KV behind sliding windows is freed, in %d groups of layers", len(freeing.groups))
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


def _grammars(config: WorkerConfig, model: ServedConfig) -> Grammars:
    return GuidanceGrammars(open_model(config.model), vocab_size=model.vocab_size, eos_ids=model.eos_token_ids)


def _capture(
    config: WorkerConfig, runner: TorchRunner, decoder: ServedDecoder, *, max_blocks: int, num_groups: int
) -> None:
    reason = why_eager(decoder) if config.cuda_graphs else "cuda_graphs is off"
    if runner.keeps_hidden:
        reason = f"speculate is {config.speculate}, whose heads read hidden states"
    if reason:
        log.warning("decode steps run without CUDA graphs: %s", reason)
    else:
        runner.capture(CudaRecorder(), max_rows=config.max_num_seqs, max_blocks=max_blocks, num_groups=num_groups)


def _scheduler_config(config: WorkerConfig, model: ServedConfig, max_model_len: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_token_ids,
        **config.step_limits(),
    )


def _load(
    config: WorkerConfig, group: TensorParallel, device: str, dtype: str, on_progress: Progress | None
) -> ServedDecoder:
    if device == "cpu":
        num_bytes = weight_bytes(config.model, dtype, config.quantize)
        check_weights_fit(num_bytes // config.tp, free_ram_bytes(), device)
    try:
        decoder = load_served(
            config.model,
            device=device,
            dtype=dtype,
            quantize=config.quantize,
            parallel=group,
            expert_parallel=config.expert_parallel,
            on_progress=on_progress,
        )
        if device == "cpu":
            keep_freed_memory()
        return decoder
    except torch.OutOfMemoryError as error:
        raise Misconfigured(f"{config.model} does not fit into the GPU's memory: raise tp", param="model") from error
