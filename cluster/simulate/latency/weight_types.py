"""The simulated type of a quantised checkpoint's weights, by the `quantization_config` of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.simulate.latency.shapes import BFLOAT16, DTYPES, FP8, FP8_BLOCK, INT4, INT8, MXFP4
from protos.errors import Misconfigured

_MOST_BITS = 5.0  # of int4, on average: EXL2's bits are no whole number


def stored_type(quantization: object, given: str) -> str:
    """One of `DTYPES`; without quantisation, and of gpt-oss's layers besides experts, bfloat16. Fewer than 4 bits count
    as 4. Raises Misconfigured for a method that has no such type, or that does not say its bits."""
    if not quantization:
        return BFLOAT16
    found = _type_of(quantization) if isinstance(quantization, dict) else None
    if found is None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise Misconfigured(
            f"{given}: quantization_config of {method!r}: simulated weights are {', '.join(DTYPES)}: give the "
            "nearest as hardware.dtype",
            param="hardware.model",
        )
    return found


def _type_of(quantization: Mapping[str, Any]) -> str | None:
    match quantization.get("quant_method"):
        case "mxfp4":
            return BFLOAT16
        case "fp8":
            return FP8_BLOCK if quantization.get("weight_block_size") else FP8
        case "gptq" | "awq" | "exl2":
            return _of_bits(quantization.get("bits", quantization.get("w_bit")))
        case "bitsandbytes":
            return INT4 if quantization.get("load_in_4bit") else INT8
        case "compressed-tensors":
            return _of_groups(quantization.get("config_groups"))
    return None


def _of_groups(groups: object) -> str | None:
    """By the first group: layers of other types are few."""
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    if not isinstance(weights, dict):
        return None
    if weights.get("type") == "float":
        if weights.get("num_bits") == 4:
            return MXFP4 if weights.get("group_size") == 32 else None
        return FP8_BLOCK if weights.get("strategy") == "block" else FP8
    return _of_bits(weights.get("num_bits"))


def _of_bits(bits: object) -> str | None:
    if not isinstance(bits, int | float) or isinstance(bits, bool) or not 1 < bits <= 8:
        return None
    return INT4 if bits <= _MOST_BITS else INT8
