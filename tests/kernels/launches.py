"""One launch of every kernel in the shapes of an 8B model, for compiling. Tensors are only as long as they must be."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workers.kernels.blocks import gather, scatter
from workers.kernels.draw import Draws, draw
from workers.kernels.paged_decode import DecodePlan, paged_decode
from workers.kernels.prefill import PrefillPlan, prefill, prefill_tile
from workers.kernels.rms_norm import add_rms_norm, rms_norm
from workers.kernels.rope_kv_write import rope_kv_write
from workers.kernels.silu_mul import silu_mul
from workers.kernels.vocab import embed, join

_N, _K, _D, _BS = 32, 8, 128, 16
_TABLES = torch.zeros(1, 16, dtype=torch.int32)
_ITEMS = torch.zeros(1, 6, dtype=torch.int32)
_INDEX = torch.zeros(4, dtype=torch.int32)


def _cache(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(2, _K, _BS, _D, dtype=dtype)


def _decode(window: int | None) -> Callable[[torch.dtype], None]:
    def launch(dtype: torch.dtype) -> None:
        q_TND = torch.zeros(1, _N, _D, dtype=dtype)
        paged_decode(
            q_TND,
            _cache(dtype),
            _cache(dtype),
            torch.empty_like(q_TND),
            _TABLES,
            plan=DecodePlan(items_W6=_ITEMS, parts_R3=_ITEMS[:, :3].contiguous()),
            scale=1.0,
            window=window,
        )

    return launch


def _prefill(window: int | None, max_query: int) -> Callable[[torch.dtype], None]:
    def launch(dtype: torch.dtype) -> None:
        q_TND = torch.zeros(1, _N, _D, dtype=dtype)
        prefill(
            q_TND,
            _cache(dtype),
            _cache(dtype),
            torch.empty_like(q_TND),
            _TABLES,
            plan=PrefillPlan(work_W4=_INDEX.view(1, 4), tile=prefill_tile(_D, _N // _K, dtype, max_query)),
            scale=1.0,
            window=window,
        )

    return launch


def _write(dtype: torch.dtype) -> None:
    qkv = torch.split(torch.zeros(1, (_N + 2 * _K) * _D, dtype=dtype), [_N * _D, _K * _D, _K * _D], dim=1)
    q_TND, k_TKD, v_TKD = (part.view(1, -1, _D) for part in qkv)
    angles_TP = torch.zeros(1, _D // 2)
    slots_T = torch.zeros(1, dtype=torch.int64)
    rope_kv_write(q_TND, k_TKD, v_TKD, angles_TP, angles_TP, _cache(dtype), _cache(dtype), slots_T)


def _norm(dtype: torch.dtype) -> None:
    x_TE = torch.zeros(1, 4096, dtype=dtype)
    add_rms_norm(x_TE, x_TE, x_TE[0], 1e-5)


def _head_norm(dtype: torch.dtype) -> None:
    rms_norm(torch.zeros(1, _N, _D, dtype=dtype), torch.zeros(_D, dtype=dtype), 1e-5)


def _sampling(dtype: torch.dtype) -> None:
    """Logits are float32 whatever the model's type."""
    logits_RV = torch.zeros(1, 128_256)
    one = {"temperatures": [1.0], "min_ps": [0.0], "top_ks": [40], "top_ps": [0.9], "seeds": [1], "indices": [2]}
    draw(logits_RV, Draws.pack(**one, vocab_size=128_256, device="cpu"))  # type: ignore[arg-type]


def _blocks(dtype: torch.dtype) -> None:
    cache, ids = torch.zeros(1, 2, 2, _K, _BS, _D, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    scatter(cache, ids, gather(cache, ids))


LAUNCHES: dict[str, Callable[[torch.dtype], object]] = {
    "decode": _decode(None),
    "decode, window": _decode(4096),
    "prefill": _prefill(None, 2048),
    "prefill, short chunk": _prefill(None, 16),
    "prefill, window": _prefill(4096, 2048),
    "rope and KV write": _write,
    "add and norm": _norm,
    "norm of heads": _head_norm,
    "silu_mul": lambda dtype: silu_mul(torch.zeros(1, 2 * 14336, dtype=dtype)),
    "gather and scatter": _blocks,
    "draw": _sampling,
    "embed": lambda dtype: embed(torch.zeros(1, dtype=torch.int64), torch.zeros(2, 4096, dtype=dtype), 0),
    "join": lambda dtype: join(torch.zeros(2, 1, 64_128, dtype=dtype), 128_256),
}
