"""The embedding and the logits of a model whose vocabulary is divided among ranks, in Triton.

Legend: T tokens, E hidden size, P ranks, R rows, S ids of a rank's share, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Both only move bytes: 8 elements a thread, 16 bytes of bfloat16, as `silu_mul`. Chosen by reasoning, not measured yet.
_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def _embed(ids_ptr, table_ptr, out_ptr, start, share, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns_E = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_E = columns_E < SIZE
    row = tl.load(ids_ptr + token) - start
    mine_E = inside_E & (row >= 0) & (row < share)
    vector_E = tl.load(table_ptr + row * SIZE + columns_E, mask=mine_E, other=0.0)
    tl.store(out_ptr + token * SIZE + columns_E, vector_E, mask=inside_E)


@triton.jit(do_not_specialize=["num_rows"])
def _join(parts_ptr, out_ptr, num_rows, share, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids_V = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_V = ids_V < vocab_size
    rank_V = (ids_V // share).to(tl.int64)
    logits_V = tl.load(parts_ptr + (rank_V * num_rows + row) * share + ids_V % share, mask=inside_V, other=0.0)
    tl.store(out_ptr + row * vocab_size + ids_V, logits_V.to(tl.float32), mask=inside_V)


def embed(token_ids_T: torch.Tensor, table_SE: torch.Tensor, start: int) -> torch.Tensor:
    """`reference.embed`: one pass, where torch takes five."""
    assert token_ids_T.is_contiguous(), f"token ids have strides {token_ids_T.stride()}"
    assert token_ids_T.dtype == torch.int64, f"token ids are {token_ids_T.dtype}"
    assert table_SE.is_contiguous(), f"the table has strides {table_SE.stride()}"
    num_tokens, (share, size) = len(token_ids_T), table_SE.shape
    out_TE = torch.empty(num_tokens, size, dtype=table_SE.dtype, device=table_SE.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, _BLOCK))
        _embed[grid](token_ids_T, table_SE, out_TE, start, share, SIZE=size, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return out_TE


def join(parts_PRS: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`reference.join`: joined, without the padding, and converted to float32 in one pass."""
    num_ranks, num_rows, share = parts_PRS.shape
    assert parts_PRS.is_contiguous(), f"the ranks' logits have strides {parts_PRS.stride()}"
    assert num_ranks * share >= vocab_size, f"{num_ranks} shares of {share} for a vocabulary of {vocab_size}"
    out_RV = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=parts_PRS.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(vocab_size, _BLOCK))
        _join[grid](parts_PRS, out_RV, num_rows, share, vocab_size, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return out_RV
