"""Latent attention in shapes of DeepSeek-V3, with the 16 heads of one rank of 8, and with all 128: tokens that decode,
and a prompt. Legend of shape suffixes: `workers.kernels.latent_pages`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.gpu.cases import Goal, KernelCase
from workers.kernels.latent_pages import head_programs, heads_of_program, latent_decode, latent_prefill, latent_tile
from workers.kernels.paged_decode import DecodePlan, plan_decode
from workers.kernels.prefill import PrefillPlan, plan_prefill

RANK, ROTATED, BLOCK_SIZE = 512, 64, 16
HEADS = (16, 128)
DECODES = {"batch 64, 8k": [8192] * 64, "batch 1, 32k": [32_768]}
PROMPT = 4096


def latent_cases(device: str, *, divisor: int = 1) -> Iterator[KernelCase]:
    for num_heads in HEADS if divisor == 1 else HEADS[:1]:
        for shape, lens in DECODES.items():
            here = [max(1, length // divisor) for length in lens[-max(1, len(lens) // divisor) :]]
            yield _decode(f"{shape}, {num_heads} heads", here, num_heads, device)
        yield _prompt(f"one of 4k, {num_heads} heads", max(1, PROMPT // divisor), num_heads, device)


class _Latents:
    """Random rows of (new tokens, context) over random pages."""

    def __init__(self, rows: Sequence[tuple[int, int]], num_heads: int, device: str) -> None:
        counts = [-(-context // BLOCK_SIZE) for _, context in rows]
        tables = torch.split(torch.randperm(sum(counts), dtype=torch.int32, device=device), counts)
        self.tables_SB = torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True)
        width = RANK + ROTATED
        self.cache = torch.empty(sum(counts), 1, BLOCK_SIZE, width, dtype=torch.bfloat16, device=device).normal_()
        num_tokens = sum(new for new, _ in rows)
        self.q_TNW = torch.randn(num_tokens, num_heads, width, device=device).bfloat16()
        self.out_TNL = torch.empty(num_tokens, num_heads, RANK, dtype=torch.bfloat16, device=device)
        self.num_bytes = sum(context for _, context in rows) * width * 2 + self.q_TNW.nbytes + self.out_TNL.nbytes


def _decode(shape: str, lens: Sequence[int], num_heads: int, device: str) -> KernelCase:
    paged = _Latents([(1, length) for length in lens], num_heads, device)
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else 1
    arrays = plan_decode(
        range(len(lens)),
        range(len(lens) + 1),
        lens,
        window=None,
        num_kv_heads=head_programs(num_heads, torch.bfloat16),
        num_multiprocessors=num_multiprocessors,
    )
    items_W6, parts_R3 = (torch.from_numpy(array).to(device) for array in arrays)
    plan = DecodePlan(items_W6=items_W6, parts_R3=parts_R3)
    return KernelCase(
        kernel="latent_decode",
        shape=shape,
        launch=lambda: latent_decode(
            paged.q_TNW, paged.cache, paged.out_TNL, paged.tables_SB, plan=plan, scale=192**-0.5
        ),
        num_bytes=paged.num_bytes,
        num_flops=_flops(num_heads, sum(lens)),
        goal=Goal(share=0.6),
    )


def _prompt(shape: str, length: int, num_heads: int, device: str) -> KernelCase:
    paged, group = _Latents([(length, length)], num_heads, device), heads_of_program(num_heads, torch.bfloat16)
    tile = latent_tile(torch.bfloat16, heads=group, prompts=True)
    work_W4 = plan_prefill([0], [0, length], [length], group=group, tile=tile)
    plan = PrefillPlan(work_W4=torch.from_numpy(work_W4).to(device), tile=tile)
    return KernelCase(
        kernel="latent_prefill",
        shape=shape,
        launch=lambda: latent_prefill(
            paged.q_TNW, paged.cache, paged.out_TNL, paged.tables_SB, plan=plan, scale=192**-0.5
        ),
        num_bytes=paged.num_bytes,
        num_flops=_flops(num_heads, length * (length + 1) // 2),
    )


def _flops(num_heads: int, pairs: int) -> int:
    return 2 * num_heads * (2 * RANK + ROTATED) * pairs
