"""One launch of every kernel in the shapes of an 8B model, for compiling. Tensors are only as long as they must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import triton

from workers.kernels.block_copies import gather, scatter
from workers.kernels.device_kernels import ExpertWeight, KVScales
from workers.kernels.draw import Draws, draw
from workers.kernels.experts.grouped_experts import grouped_experts
from workers.kernels.latent_pages import heads_of_program, latent_decode, latent_prefill, latent_tile, latent_write
from workers.kernels.paged_decode import DecodePlan, paged_decode
from workers.kernels.prefill import PrefillPlan, prefill, prefill_tile
from workers.kernels.quantised.activations import RoundedInputs, round_inputs
from workers.kernels.quantised.grouped_codes import grouped_product
from workers.kernels.quantised.one_byte import ByteCodes, byte_product
from workers.kernels.quantised.packed_weights import packed_groups
from workers.kernels.quantised.product_choice import ByteProduct, GroupedProduct
from workers.kernels.rms_norm import add_rms_norm, rms_norm
from workers.kernels.rope_kv_write import rope_kv_write
from workers.kernels.silu_mul import gelu_tanh_mul, silu_mul
from workers.kernels.vocab import embed, join
from workers.quantization.activation_rounding import ActivationRounding
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight

_N, _K, _D, _BS = 32, 8, 128, 16
_MULTIPROCESSORS = 132
_TABLES = torch.zeros(1, 16, dtype=torch.int32)
_ITEMS = torch.zeros(1, 6, dtype=torch.int32)
_CAPPED: dict[str, Any] = {"softcap": 50.0, "sinks_N": torch.zeros(_N)}
_KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_INDEX = torch.zeros(4, dtype=torch.int32)


def _cache(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(2, _K, _BS, _D, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.zeros(
        2, _K, _BS, _D, dtype=dtype
    )  # fmt: skip


def _scales(kind: torch.dtype | None) -> KVScales | None:
    if kind is None:
        return None
    scale = torch.zeros(2, _K, _BS) if kind == torch.int8 else torch.zeros(_K)
    return scale, scale


def _decode(window: int | None, *, kind: torch.dtype | None = None, **options: Any) -> Callable[[torch.dtype], None]:
    def launch(dtype: torch.dtype) -> None:
        q_TND = torch.zeros(1, _N, _D, dtype=dtype)
        paged_decode(
            q_TND,
            _cache(kind or dtype),
            _cache(kind or dtype),
            torch.empty_like(q_TND),
            _TABLES,
            plan=DecodePlan(items_W6=_ITEMS, parts_R3=_ITEMS[:, :3].contiguous()),
            scale=1.0,
            window=window,
            scales=_scales(kind),
            **options,
        )

    return launch


def _prefill(
    window: int | None, max_query: int, *, kind: torch.dtype | None = None, **options: Any
) -> Callable[[torch.dtype], None]:
    def launch(dtype: torch.dtype) -> None:
        q_TND = torch.zeros(1, _N, _D, dtype=dtype)
        tile = prefill_tile(_D, _N // _K, dtype, max_query, rounded=kind is not None)
        prefill(
            q_TND,
            _cache(kind or dtype),
            _cache(kind or dtype),
            torch.empty_like(q_TND),
            _TABLES,
            plan=PrefillPlan(work_W4=_INDEX.view(1, 4), tile=tile),
            scale=1.0,
            window=window,
            scales=_scales(kind),
            **options,
        )

    return launch


def _latent(dtype: torch.dtype) -> None:
    """DeepSeek-V3's 128 heads."""
    cache = torch.zeros(2, 1, _BS, 576, dtype=dtype)
    q_TNW, out_TNL = torch.zeros(1, 128, 576, dtype=dtype), torch.zeros(1, 128, 512, dtype=dtype)
    plan = DecodePlan(items_W6=_ITEMS, parts_R3=_ITEMS[:, :3].contiguous())
    latent_decode(q_TNW, cache, out_TNL, _TABLES, plan=plan, scale=1.0)


def _latent_prompt(dtype: torch.dtype) -> None:
    cache = torch.zeros(2, 1, _BS, 576, dtype=dtype)
    q_TNW, out_TNL = torch.zeros(1, 128, 576, dtype=dtype), torch.zeros(1, 128, 512, dtype=dtype)
    plan = PrefillPlan(
        work_W4=_INDEX.view(1, 4), tile=latent_tile(dtype, heads=heads_of_program(128, dtype), prompts=True)
    )
    latent_prefill(q_TNW, cache, out_TNL, _TABLES, plan=plan, scale=1.0)


def _latent_write(dtype: torch.dtype) -> None:
    cache, angles_TP = torch.zeros(2, 1, _BS, 576, dtype=dtype), torch.zeros(1, 32)
    q_TNW, slots_T = torch.zeros(1, 128, 576, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    latent_write(q_TNW, q_TNW[:, :1], angles_TP, angles_TP, cache, slots_T)


def _write(kind: torch.dtype | None = None) -> Callable[[torch.dtype], None]:
    def launch(dtype: torch.dtype) -> None:
        qkv = torch.split(torch.zeros(1, (_N + 2 * _K) * _D, dtype=dtype), [_N * _D, _K * _D, _K * _D], dim=1)
        q_TND, k_TKD, v_TKD = (part.view(1, -1, _D) for part in qkv)
        angles_TP, slots_T = torch.zeros(1, _D // 2), torch.zeros(1, dtype=torch.int64)
        caches = _cache(kind or dtype), _cache(kind or dtype)
        rope_kv_write(q_TND, k_TKD, v_TKD, angles_TP, angles_TP, *caches, slots_T, _scales(kind))

    return launch


def _norm(dtype: torch.dtype) -> None:
    x_TE = torch.zeros(1, 4096, dtype=dtype)
    add_rms_norm(x_TE, x_TE, x_TE[0], 1e-5)


def _head_norm(dtype: torch.dtype) -> None:
    rms_norm(torch.zeros(1, _N, _D, dtype=dtype), torch.zeros(_D, dtype=dtype), 1e-5)


def _sampling(dtype: torch.dtype) -> None:
    """Logits are float32 whatever the model's type."""
    logits_RV = torch.zeros(1, 128_256)
    sampled = {"temperatures": [1.0], "min_ps": [0.0], "top_ks": [40], "top_ps": [0.9], "seeds": [1], "indices": [2]}
    draw(logits_RV, Draws.pack(**sampled, vocab_size=128_256, device="cpu"))  # type: ignore[arg-type]


def _blocks(dtype: torch.dtype) -> None:
    cache, ids = torch.zeros(1, 2, 2, _K, _BS, _D, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    scatter(cache, ids, gather(cache, ids))


def _weight(bits: int, group: int, *, outputs: int = 128, inputs: int = 1024, k_quant: bool = False) -> QuantisedWeight:
    """With scales, and zero points of groups; or, of a K-quant, scales in two levels, below 6 bits minimums."""
    groups_OG = torch.zeros(outputs, inputs // group, dtype=torch.uint8)
    scale = GroupValues(value_OB=torch.zeros(outputs, inputs // group, dtype=torch.float16))
    if k_quant:
        scale = GroupValues(value_OB=torch.zeros(outputs, inputs // 256, dtype=torch.float16), factor_OG=groups_OG)
    return QuantisedWeight(
        bits=bits,
        codes_OW=torch.zeros(outputs, inputs * bits // 8, dtype=torch.uint8),
        num_inputs=inputs,
        scale=scale,
        group_size=group,
        zero=groups_OG if bits == 4 and not k_quant else 2 ** (bits - 1),
        minimum=scale if k_quant and bits < 6 else None,
    )


def _grouped(bits: int, group: int, rows: int, *, k_quant: bool = False) -> Callable[[torch.dtype], None]:
    def launch(dtype: torch.dtype) -> None:
        codes = packed_groups(_weight(bits, group, k_quant=k_quant), _MULTIPROCESSORS)
        assert codes is not None
        grouped_product(torch.zeros(rows, 1024, dtype=dtype), codes)

    return launch


def _has_fp8_units() -> bool:
    return bool(triton.runtime.driver.active.get_current_target().arch >= 89)


def _fp8_types() -> tuple[torch.dtype, torch.dtype]:
    """The types of weights, and of inputs."""
    return (torch.float8_e4m3fn, torch.float8_e4m3fn) if _has_fp8_units() else (torch.uint8, torch.float16)


def _byte_codes(levels: str, *, outputs: int = 128, inputs: int = 1024) -> ByteCodes:
    groups = 1 if levels == "int8" else inputs // 128
    return ByteCodes(
        levels_OI=torch.zeros(outputs, inputs).to(torch.int8 if levels == "int8" else _fp8_types()[0]),
        scale_GO=torch.zeros(groups, outputs),
        row_sums_O=None,
        num_multiprocessors=_MULTIPROCESSORS,
    )


def _bytes(levels: str, rows: int) -> Callable[[torch.dtype], None]:
    def launch(dtype: torch.dtype) -> None:
        codes = _byte_codes(levels)
        x_type = torch.int8 if levels == "int8" else _fp8_types()[1]
        scale_TG = torch.zeros(rows, len(codes.scale_GO))
        byte_product(RoundedInputs(levels_TI=torch.zeros(rows, 1024).to(x_type), scale_TG=scale_TG), codes, dtype=dtype)

    return launch


def _rounded(levels: Literal["int8", "fp8"], group: int | None) -> Callable[[torch.dtype], None]:
    def launch(dtype: torch.dtype) -> None:
        fp8_type = torch.float8_e4m3fn if _has_fp8_units() else torch.float16
        round_inputs(torch.zeros(1, 14336, dtype=dtype), levels=levels, group=group, fp8_type=fp8_type)

    return launch


def _expert_weight(form: str, outputs: int, inputs: int, dtype: torch.dtype) -> ExpertWeight:
    if form == "float":
        return torch.zeros(outputs, inputs, dtype=dtype)
    if form in ("int8", "fp8"):
        group = 128 if form == "fp8" else None
        rounding = ActivationRounding(levels="fp8" if form == "fp8" else "int8", group=group)
        return ByteProduct(_byte_codes(form, outputs=outputs, inputs=inputs), rounding)
    weight = _weight(4, 32 if form == "Q4_K" else 128, outputs=outputs, inputs=inputs, k_quant=form == "Q4_K")
    codes = packed_groups(weight, _MULTIPROCESSORS)
    assert codes is not None
    return GroupedProduct(codes)


def _experts(num_tokens: int, form: str = "float") -> Callable[[torch.dtype], None]:
    """Addresses are those of the only expert: nothing reads them."""

    def launch(dtype: torch.dtype) -> None:
        hidden, width = (2048, 768) if form == "float" else (512, 256)
        gate_up = dict.fromkeys(range(8), _expert_weight(form, 2 * width, hidden, dtype))
        down = dict.fromkeys(range(8), _expert_weight(form, hidden, width, dtype))
        experts = grouped_experts(gate_up, down, silu_mul, num_experts=8)
        assert experts is not None
        chosen_TS = torch.arange(4).expand(num_tokens, 4).contiguous()
        experts(torch.zeros(num_tokens, hidden, dtype=dtype), chosen_TS, torch.zeros(num_tokens, 4))

    return launch


LAUNCHES: dict[str, Callable[[torch.dtype], object]] = {
    "decode": _decode(None),
    "decode, window": _decode(4096),
    "decode, soft cap and sinks": _decode(None, **_CAPPED),
    "prefill": _prefill(None, 2048),
    "prefill, soft cap and sinks": _prefill(None, 2048, **_CAPPED),
    "prefill, short chunk": _prefill(None, 16),
    "prefill, window": _prefill(4096, 2048),
    "latent decode": _latent,
    "latent prefill": _latent_prompt,
    "latent write": _latent_write,
    "rope and KV write": _write(),
    **{f"decode, {name} KV": _decode(None, kind=kind) for name, kind in _KINDS.items()},
    **{f"prefill, {name} KV": _prefill(None, 2048, kind=kind) for name, kind in _KINDS.items()},
    **{f"rope and KV write, {name}": _write(kind) for name, kind in _KINDS.items()},
    "add and norm": _norm,
    "norm of heads": _head_norm,
    "silu_mul": lambda dtype: silu_mul(torch.zeros(1, 2 * 14336, dtype=dtype)),
    "gelu_tanh_mul": lambda dtype: gelu_tanh_mul(torch.zeros(1, 2 * 14336, dtype=dtype)),
    "norm, weight in float32": lambda dtype: rms_norm(torch.zeros(1, 4096, dtype=dtype), torch.zeros(4096), 1e-6),
    "gather and scatter": _blocks,
    "draw": _sampling,
    "experts, few rows": _experts(1),
    "experts, many rows": _experts(64),
    **{f"{form} experts, {rows} rows": _experts(rows, form) for form in ("4 bits", "int8", "fp8") for rows in (1, 64)},
    "Q4_K experts, 64 rows": _experts(64, "Q4_K"),
    "embed": lambda dtype: embed(torch.zeros(1, dtype=torch.int64), torch.zeros(2, 4096, dtype=dtype), 0),
    "join": lambda dtype: join(torch.zeros(2, 1, 64_128, dtype=dtype), 128_256),
    **{f"4 bits, {rows} rows": _grouped(4, 128, rows) for rows in (1, 64, 512)},
    **{f"8 bits, {rows} rows": _grouped(8, 128, rows) for rows in (1, 512)},
    **{f"Q4_K, {rows} rows": _grouped(4, 32, rows, k_quant=True) for rows in (1, 512)},
    **{f"Q6_K, {rows} rows": _grouped(6, 16, rows, k_quant=True) for rows in (1, 512)},
    **{f"{levels}, {rows} rows": _bytes(levels, rows) for levels in ("int8", "fp8") for rows in (1, 64, 512)},
    "rounded to int8": _rounded("int8", None),
    "rounded to fp8": _rounded("fp8", 128),
}
