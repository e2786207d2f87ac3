"""The number of KV blocks that fit into a worker's memory. Computed once, at start-up, by every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from protos.errors import Misconfigured
from workers.worker_config import GPU_FRACTION, RAM_FRACTION

MAX_RAM_BYTES = 2 * 2**30
"""Largest default cache in RAM: it is zeroed at the start, which must be fast."""

_GIB = 2**30


def check_weights_fit(num_bytes: int, free_bytes: int, device: str) -> None:
    """Raises Misconfigured when a rank's share of the weights is larger than the memory that is free."""
    if num_bytes > free_bytes:
        raise Misconfigured(
            f"the weights take {num_bytes / _GIB:.2f} GiB on each rank, {free_bytes / _GIB:.2f} GiB are free on "
            f"{device}: raise tp, or give dtype bfloat16",
            param="model",
        )


def blocks_in_ram(block_bytes: int, *, fraction: float | None, free_bytes: int, max_useful: int) -> int:
    """Blocks for `fraction` of the free RAM (default RAM_FRACTION and at most MAX_RAM_BYTES), `max_useful` at most.

    Raises Misconfigured when not one fits.
    """
    budget = int(free_bytes * RAM_FRACTION) if fraction is None else int(free_bytes * fraction)
    if fraction is None:
        budget = min(budget, MAX_RAM_BYTES)
    return _at_least_one(min(budget // block_bytes, max_useful), budget, block_bytes, "RAM")


def blocks_on_gpu(
    block_bytes: int,
    *,
    fraction: float | None,
    device: str,
    largest_step: Callable[[], object],
    beside_bytes: int = 0,
) -> int:
    """Returns the number of blocks that fit into `fraction` of the GPU's memory (default GPU_FRACTION) beside the
    model, its largest step and `beside_bytes`. Runs that step to measure it. Raises Misconfigured if not one block, or
    not even the step, fits."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        largest_step()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise Misconfigured(
            "the largest step does not fit into the GPU's memory: lower max_num_batched_tokens or max_model_len",
            param="max_num_batched_tokens",
        ) from error
    peak = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)  # the driver, and other processes on the card
    torch.cuda.empty_cache()
    budget = int(total * (GPU_FRACTION if fraction is None else fraction)) - others - peak - beside_bytes
    return _at_least_one(budget // block_bytes, budget, block_bytes, "GPU memory")


def _at_least_one(num_blocks: int, budget: int, block_bytes: int, where: str) -> int:
    if num_blocks < 1:
        raise Misconfigured(
            f"{max(0, budget) / _GIB:.2f} GiB of {where} are left for KV, one block takes "
            f"{block_bytes / _GIB:.4f} GiB: raise memory_fraction or tp",
            param="memory_fraction",
        )
    return num_blocks
