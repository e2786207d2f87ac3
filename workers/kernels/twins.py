"""Every kernel in plain torch. The fast kernels are tested against these twins, and CPUs fall back to them.

Legend: T tokens, E hidden size, F intermediate size, H heads (of queries or keys), N query heads, K key/value heads, D
head dim, P D / 2 rotated pairs, NB blocks of the cache, BS positions of a block, B blocks of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from workers.kernels.device_kernels import ExpertWeight, KVScales
from workers.quantization.quantised_weight import QuantisedWeight

LEAST_SCALE = 2.0**-126
"""So that a head of zeros has a scale, and a quotient stays within the range."""

_INT8_MOST, _FP8_MOST = 127, 448.0


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, in float32, rounded to the weight's dtype before the weight and to
    x's dtype after it."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(weight.dtype)).to(x.dtype)


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual): the residual stream and its normed copy."""
    stream_TE = x_TE + residual_TE
    return rms_norm(stream_TE, weight_E, eps), stream_TE


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Over the last dimension, in float32, as weight and bias are; rounded once, to x's dtype."""
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


def rope(x_THD: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (i, i + D / 2) of each head by the token's angles (float32). Returns x's dtype."""
    cos_T1P, sin_T1P = cos_TP.unsqueeze(1), sin_TP.unsqueeze(1)
    first_THP, second_THP = x_THD.float().chunk(2, dim=-1)
    rotated = (first_THP * cos_T1P - second_THP * sin_T1P, second_THP * cos_T1P + first_THP * sin_T1P)
    return torch.cat(rotated, dim=-1).to(x_THD.dtype)


def silu_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where the last dimension holds first all of gate, then all of up."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def activate(x_TF: torch.Tensor, activation: str) -> torch.Tensor:
    """silu, gelu, gelu_tanh or relu2 of each number."""
    match activation:
        case "silu":
            return F.silu(x_TF)
        case "gelu" | "gelu_tanh":
            return F.gelu(x_TF, approximate="tanh" if activation == "gelu_tanh" else "none")
        case _:
            assert activation == "relu2", f"activation is {activation}"
            return F.relu(x_TF).square()


def gelu_tanh_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up by gelu's approximation with tanh (https://arxiv.org/abs/1606.08415); halves as in `silu_mul`."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return F.gelu(gate_TF, approximate="tanh") * up_TF


def to_int8(x_TKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(integers [T, K, D], scales [T, K] in float32): absmax / 127, quotients to the nearest, ties to even. A head with
    a number that is not finite has such a scale."""
    wide_TKD = x_TKD.float()
    scales_TK = (wide_TKD.abs().amax(-1) * (1 / _INT8_MOST)).clamp(min=LEAST_SCALE)
    quotients_TKD = torch.nan_to_num(wide_TKD / scales_TK.unsqueeze(-1), nan=0.0)
    return quotients_TKD.round().to(torch.int8), scales_TK


def to_fp8(x_TKD: torch.Tensor, scale_K: torch.Tensor) -> torch.Tensor:
    """e4m3 [T, K, D] of the quotients, to the nearest, ties to even, at most 448; NaN for numbers that are not
    finite."""
    quotients_TKD = (x_TKD.float() / scale_K.unsqueeze(-1)).clamp(-_FP8_MOST, _FP8_MOST)
    return quotients_TKD.masked_fill(~x_TKD.isfinite(), torch.nan).to(torch.float8_e4m3fn)


def widened(cache: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """The float32 values of a part [blocks, K, block size, D] in 8 bits; any other part as it is."""
    if scales is None:
        return cache
    if scales.dim() == 1:
        scales = scales[None, :, None]
    return cache.float() * scales.unsqueeze(-1)


def kv_write(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_T: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """Writes each token's keys and values to its slot (block * BS + offset) of the caches [NB, K, BS, D], rounded where
    they have `scales`, and the scales of int8."""
    block_size = k_cache.shape[2]
    blocks_T, offsets_T = slots_T // block_size, slots_T % block_size
    for part, (x_TKD, cache) in enumerate(((k_TKD, k_cache), (v_TKD, v_cache))):
        if scales is None:
            cache[blocks_T, :, offsets_T] = x_TKD
        elif cache.dtype == torch.int8:
            cache[blocks_T, :, offsets_T], scales[part][blocks_T, :, offsets_T] = to_int8(x_TKD)
        else:
            rounded_TKD = to_fp8(x_TKD, scales[part])
            cache.view(torch.uint8)[blocks_T, :, offsets_T] = rounded_TKD.view(torch.uint8)


def rope_kv_write(
    q_TND: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cos_TP: torch.Tensor,
    sin_TP: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_T: torch.Tensor,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """`rope` of queries and keys, then `kv_write`. Returns the rotated queries."""
    kv_write(rope(k_TKD, cos_TP, sin_TP), v_TKD, k_cache, v_cache, slots_T, scales)
    return rope(q_TND, cos_TP, sin_TP)


def latent_write(
    q_TNW: torch.Tensor,
    latent_T1W: torch.Tensor,
    cos_TP: torch.Tensor,
    sin_TP: torch.Tensor,
    cache: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """`rope` of the last 2 P dimensions of queries and latents; latents go to their slots of [NB, 1, BS, W]. Returns
    the queries."""
    block_size = cache.shape[2]
    cache[slots_T // block_size, :, slots_T % block_size] = rope_last(latent_T1W, cos_TP, sin_TP)
    return rope_last(q_TNW, cos_TP, sin_TP)


def rope_last(x_THD: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor) -> torch.Tensor:
    """`rope` of the last 2 P dimensions of each head."""
    still = x_THD.shape[-1] - 2 * cos_TP.shape[-1]
    return torch.cat((x_THD[..., :still], rope(x_THD[..., still:], cos_TP, sin_TP)), dim=-1)


def head_products(x_TNI: torch.Tensor, weight_NIO: torch.Tensor) -> torch.Tensor:
    """[T, N, O]: a matrix of its own for each head."""
    return torch.bmm(x_TNI.transpose(0, 1), weight_NIO).transpose(0, 1)


def paged_attention(
    q_TND: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    query_starts: tuple[int, ...],
    context_lens: tuple[int, ...],
    block_tables_SB: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    sinks_N: torch.Tensor | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Causal attention of packed rows over their pages, row by row in float32. A row reads no page but its own.

    The arguments are those of `workers.attention.backend`, the caches [NB, K, BS, D]. Returns [T, N, D] in q's dtype.
    """
    num_kv_heads, block_size = k_cache.shape[1:3]
    out_TND = q_TND.new_empty(*q_TND.shape[:2], v_cache.shape[3])
    k_scales, v_scales = scales or (None, None)
    for row, context_len in enumerate(context_lens):
        start, stop = query_starts[row], query_starts[row + 1]
        positions_Q1 = torch.arange(context_len - (stop - start), context_len, device=q_TND.device).unsqueeze(1)
        first = 0 if window is None else max(0, context_len - (stop - start) + 1 - window)
        first_page = first // block_size
        pages_B = block_tables_SB[row, first_page : -(-context_len // block_size)].long()
        seen = slice(first - first_page * block_size, context_len - first_page * block_size)
        keys, values = (
            widened(cache[pages_B], part if part is None or part.dim() == 1 else part[pages_B])
            for cache, part in ((k_cache, k_scales), (v_cache, v_scales))
        )
        k_K1CD, v_K1CD = (part.float().transpose(0, 1).flatten(1, 2)[:, None, seen] for part in (keys, values))
        positions_C = torch.arange(first, context_len, device=q_TND.device)
        visible_QC = positions_C <= positions_Q1
        if window is not None:
            visible_QC &= positions_C > positions_Q1 - window
        q_KGQD = q_TND[start:stop].transpose(0, 1).unflatten(0, (num_kv_heads, -1)).float()
        sinks_KG1 = None if sinks_N is None else sinks_N.view(num_kv_heads, -1, 1)
        out_KGQD = attention(q_KGQD, k_K1CD, v_K1CD, visible_QC, scale=scale, softcap=softcap, sinks_Q=sinks_KG1)
        out_TND[start:stop] = out_KGQD.flatten(0, 1).transpose(0, 1).to(q_TND.dtype)
    return out_TND


def capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """softcap * tanh(scores / softcap); 0 leaves them as they are."""
    return torch.tanh(scores / softcap) * softcap if softcap else scores


def softmax(scores_QC: torch.Tensor, sinks_Q: torch.Tensor | None) -> torch.Tensor:
    """Weights of logits [..., Q, C]. Sinks, which broadcast to [..., Q], are one more logit of each query, dropped
    from the result."""
    if sinks_Q is None:
        return scores_QC.softmax(-1)
    sinks_Q1 = sinks_Q.to(scores_QC.dtype).expand(scores_QC.shape[:-1]).unsqueeze(-1)
    return torch.cat((scores_QC, sinks_Q1), dim=-1).softmax(-1)[..., :-1]


def attention(
    q_QD: torch.Tensor,
    k_CD: torch.Tensor,
    v_CD: torch.Tensor,
    visible_QC: torch.Tensor | None,
    *,
    scale: float,
    softcap: float,
    sinks_Q: torch.Tensor | None,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with the options of `workers.attention.backend`, in float32. Further dimensions
    broadcast. Without `visible_QC` a query sees the keys up to its own, which are the last Q. Returns q's dtype."""
    if visible_QC is None:
        num_queries, num_keys = q_QD.shape[-2], k_CD.shape[-2]
        visible_QC = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_QD.device)
        visible_QC = visible_QC.tril(num_keys - num_queries)
    if not softcap and sinks_Q is None:
        whole = (*torch.broadcast_shapes(q_QD.shape[:-2], k_CD.shape[:-2]), -1, -1)
        wide = (q_QD.float(), k_CD.float().expand(whole), v_CD.float().expand(whole))
        return F.scaled_dot_product_attention(*wide, attn_mask=visible_QC, scale=scale).to(q_QD.dtype)
    scores_QC = capped((q_QD.float() @ k_CD.float().mT) * scale, softcap)
    weights_QC = softmax(scores_QC.masked_fill(~visible_QC, float("-inf")), sinks_Q)
    return (weights_QC @ v_CD.float()).to(q_QD.dtype)


def embed(token_ids_T: torch.Tensor, table_SE: torch.Tensor, start: int) -> torch.Tensor:
    """[T, E]: the table's rows for ids from `start` on, zeros for ids that other ranks hold."""
    rows_T = token_ids_T - start
    foreign_T1 = ((rows_T < 0) | (rows_T >= len(table_SE))).unsqueeze(1)
    return F.embedding(rows_T.clamp(0, len(table_SE) - 1), table_SE).masked_fill(foreign_T1, 0)


def join(parts_PRS: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The ranks' shares of the logits side by side, cut to the vocabulary: [R, V] in float32."""
    return parts_PRS.transpose(0, 1).flatten(1)[:, :vocab_size].float()


def gather(cache: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Staging before a transfer: blocks of [layers, 2, NB, ...], copied to [layers, 2, ids, ...], which is `out`."""
    if out is None:
        return cache.index_select(2, block_ids)
    return torch.index_select(cache, 2, block_ids, out=out)


def scatter(cache: torch.Tensor, block_ids: torch.Tensor, payload: torch.Tensor) -> None:
    """Landing after a transfer: the inverse of `gather`."""
    cache.index_copy_(2, block_ids, payload)


def grouped_experts(
    gate_up: Mapping[int, ExpertWeight],
    down: Mapping[int, ExpertWeight],
    gate: Callable[[torch.Tensor], torch.Tensor],
    *,
    num_experts: int,
    gate_up_biases: Mapping[int, torch.Tensor] | None = None,
    down_biases: Mapping[int, torch.Tensor] | None = None,
) -> None:
    """Returns None: the layer computes its experts one by one, or compiled code computes all of them."""


def quantised_product(weight: QuantisedWeight) -> None:
    """Returns None: the weight is dequantised tile by tile (`encodings.quantised.product`); the kernels' twins are in
    `tests.kernels.quantised_twins`."""
