"""Makes one rank's KV cache: how many blocks there is memory for, and the tensors, with those of a head beside them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from msgspec.structs import replace

from kvtransfer.reshard import can_move_head, rank_block_bytes
from kvtransfer.windows import PageWindows
from protos.errors import Misconfigured
from protos.values import KVLayout, SamplingParams
from workers.attention.registry import attention_for
from workers.batch import Batch, Row, Sample
from workers.kernels.device_kernels import KVScales
from workers.kv.cache_size import blocks_in_ram, blocks_on_gpu
from workers.kv.host_copies import staging_bytes
from workers.kv.kv_storage import KVStorage
from workers.models.interface import ServedDecoder
from workers.parallel.group import TensorParallel
from workers.runner.torch_runner import TorchRunner
from workers.speculation.ranks.draft_cache import Drafting
from workers.worker_config import WorkerConfig

log = logging.getLogger("baton.worker")


def with_head(layout: KVLayout, drafting: Drafting | None) -> KVLayout:
    """`layout` with the KV of a head, if that moves with the model's KV."""
    head = drafting.kv_head if drafting is not None else None
    if head is None:
        return layout
    if not can_move_head(layout, head.parts):
        log.warning(
            "KV of the head stays on this worker: its heads are not cut between %d ranks as the model's are, so fewer "
            "drafts are right after a transfer", layout.tp,
        )  # fmt: skip
        return layout
    return replace(layout, head=head)


def num_host_blocks_of(config: WorkerConfig, layout: KVLayout, free_bytes: int) -> int:
    """Blocks of the host tier: as many as fit into `host_kv_gib`, with all ranks' shares. Raises Misconfigured if that
    exceeds the free RAM."""
    block_bytes = rank_block_bytes(layout) * layout.tp
    num_blocks = int(config.host_kv_gib * 2**30) // block_bytes
    if config.host_kv_gib and not num_blocks:
        raise Misconfigured(
            f"worker.host_kv_gib = {config.host_kv_gib:g}: give 0, or at least a block, {block_bytes / 2**30:.4f}",
            param="host_kv_gib",
        )
    if num_blocks * block_bytes > free_bytes:
        raise Misconfigured(
            f"worker.host_kv_gib = {config.host_kv_gib:g}: {free_bytes / 2**30:.2f} GiB of memory are free: lower it",
            param="host_kv_gib",
        )
    return num_blocks


def num_blocks_of(
    config: WorkerConfig,
    group: TensorParallel,
    decoder: ServedDecoder,
    layout: KVLayout,
    device: str,
    max_model_len: int,
    free_bytes: int,
    beside_bytes: int,
) -> int:
    """Returns the number of blocks, the same on all ranks: the least that any of them can hold. `free_bytes` is a
    rank's share of the RAM, `beside_bytes` a proposer's KV for each block."""
    if config.num_blocks is not None:
        return config.num_blocks
    block_bytes = rank_block_bytes(layout) + beside_bytes
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
            beside_bytes=_staged_bytes(layout) if config.host_kv_gib else 0,
        )
    return int(group.all_gather(torch.tensor([mine], device=device)).min().item())


def _staged_bytes(layout: KVLayout) -> int:
    of_both = rank_block_bytes(layout)
    of_model = rank_block_bytes(replace(layout, head=None))
    return staging_bytes(of_model // len(layout.groups), of_both - of_model)


def _most_useful(config: WorkerConfig, layout: KVLayout, max_model_len: int) -> int:
    windows = PageWindows(block_size=config.block_size, windows=layout.windows)
    return -(-config.max_num_seqs * windows.num_held(max_model_len, config.largest_chunk) // len(layout.groups))


def bytes_beside(layout: KVLayout, drafting: Drafting | None) -> int:
    """Returns the proposer's KV for each page, unless the layout includes it."""
    cache = drafting.cache if drafting is not None and layout.head is None else None
    return cache.page_bytes if cache is not None else 0


def make_storage(
    layout: KVLayout,
    num_blocks: int,
    device: str,
    free_bytes: int,
    fp8_scales: Mapping[int, KVScales],
    drafting: Drafting | None,
) -> KVStorage:
    """Allocates a page of each group for each block, and as many for `drafting`."""
    num_bytes = num_blocks * (rank_block_bytes(layout) + bytes_beside(layout, drafting))
    too_much = Misconfigured(
        f"a KV cache of {num_blocks} blocks takes {num_bytes / 2**30:.2f} GiB on each rank, more than there is on "
        f"{device}: lower num_blocks, memory_fraction or host_kv_gib",
        param="num_blocks",
    )
    if device == "cpu" and num_bytes > free_bytes:  # Linux would kill the process at the first use
        raise too_much
    try:
        num_pages = num_blocks * len(layout.groups)
        storage = KVStorage(layout, num_blocks=num_pages, device=device, fp8_scales=fp8_scales)
        if drafting is not None:
            drafting.make_storage(num_pages)
            if layout.head is not None and drafting.storage is not None:
                storage.attach(drafting.storage)
        return storage
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
