"""Latents decoded in parts, with more heads than a program takes, give what float64 gives; padding is not written.
Chunks and mixed rows: `tests/contract/test_latent_attention.py`."""

from __future__ import annotations

import torch

from tests.kernels.conftest import DEVICE, assert_near, normal
from workers.kernels import twins
from workers.kernels.latent_pages import head_programs, latent_decode, latent_write
from workers.kernels.paged_decode import DecodePlan, plan_decode

RANK, ROTATED, BLOCK_SIZE = 48, 16, 16


def test_contexts_in_parts(dtype: torch.dtype) -> None:
    lens, num_heads = (300, 40, 0, 64), 20
    counts = [-(-length // BLOCK_SIZE) for length in lens]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(1)).tolist()
    cache = normal(len(order), 1, BLOCK_SIZE, RANK + ROTATED, dtype=dtype)
    tables = [[order.pop() for _ in range(count)] for count in counts]
    tables_SB = torch.tensor([table + [0] * (max(counts) - len(table)) for table in tables], dtype=torch.int32)
    cache[tables[1][-1], :, 40 % BLOCK_SIZE :] = float("nan")
    q_TNW = normal(4, num_heads, RANK + ROTATED, dtype=dtype, seed=2)
    arrays = plan_decode(
        range(4), range(5), lens,
        window=None, num_kv_heads=head_programs(num_heads, dtype), num_multiprocessors=16, min_item=64,
    )  # fmt: skip
    items_W6, parts_R3 = (torch.from_numpy(array).to(DEVICE) for array in arrays)
    out_TNL = torch.full((4, num_heads, RANK), float("nan"), dtype=dtype, device=DEVICE)
    plan = DecodePlan(items_W6=items_W6, parts_R3=parts_R3)
    latent_decode(q_TNW, cache, out_TNL, tables_SB.to(DEVICE), plan=plan, scale=0.2)
    wide = cache.double().cpu()
    for row in (0, 1, 3):
        exact = twins.paged_attention(
            q_TNW[row : row + 1].double().cpu(), wide, wide[..., :RANK], query_starts=(0, 1),
            context_lens=(lens[row],), block_tables_SB=tables_SB[row : row + 1], scale=0.2, window=None,
        )  # fmt: skip
        assert_near(out_TNL[row : row + 1], exact)
    assert not out_TNL[2].any(), "a row without context"


def test_latents_equal_the_references_and_padding_is_not_written(dtype: torch.dtype) -> None:
    q_TNW, latent_T1W = normal(3, 5, 72, dtype=dtype), normal(3, 1, 72, dtype=dtype, seed=1)
    angles_TP = normal(3, 12, dtype=torch.float32, seed=2)
    cos_TP, sin_TP = angles_TP.cos(), angles_TP.sin()
    ours, theirs = (torch.zeros(2, 1, BLOCK_SIZE, 72, dtype=dtype, device=DEVICE) for _ in range(2))
    slots_T = torch.tensor([17, 3, -1], device=DEVICE)
    turned_TNW = latent_write(q_TNW, latent_T1W, cos_TP, sin_TP, ours, slots_T)
    here = slice(0, 2)
    expected_TNW = twins.latent_write(q_TNW[here], latent_T1W[here], cos_TP[here], sin_TP[here], theirs, slots_T[here])
    torch.testing.assert_close(turned_TNW[here], expected_TNW)
    torch.testing.assert_close(ours, theirs)
