"""How a checkpoint's linear weights are stored, by its quantization_config. Each reader raises UnsupportedModel or
BadCheckpoint. Pure: `formats/` has the weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from protos.errors import BadCheckpoint, Misconfigured, UnsupportedModel
from protos.model_files.fields import Fields

_MAX_REPEATS = 5  # of a pattern: matching a name of 60 letters stays below a million steps
_MAX_PATTERN = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    label: str  # for people and fingerprints: method, bits and what else decides the weights' values
    encodings: str  # the function, as module:name in `workers.weights.formats`, to `WeightEncodings`
    settings: Any = None  # its first argument; the second is a `WeightSource`


def require_value(config: Fields, field: str, served: tuple[object, ...], default: object = None) -> None:
    """Raises UnsupportedModel for a value that is not among the served; null and absence are the default."""
    value = config.raw(field)
    if field in config and value != default and not any(value == each and type(value) is type(each) for each in served):
        raise config.unserved(field, f"it must be {' or '.join(repr(each) for each in served)}")


def bits_of(config: Fields, served: tuple[int, ...], field: str = "bits", default: int | None = None) -> int:
    bits = config.integer(field) if default is None else config.integer_or(field, default)
    if bits not in served:
        raise config.unserved(field, f"codes of {', '.join(map(str, served))} bits are")
    return bits


def group_size_of(config: Fields, field: str = "group_size", default: int | None = None) -> int | None:
    """Inputs of a group; None: all inputs are one group, written as -1. Raises BadCheckpoint."""
    if config.raw(field) == -1:
        return None
    size = config.integer(field) if default is None else config.integer_or(field, default)
    return min(size, 1 << 31)


def group_label(group_size: int | None) -> str:
    return "" if group_size is None else f"-g{group_size}"


def check_pattern(pattern: str, config: Fields) -> None:
    """Raises BadCheckpoint for an invalid regular expression, UnsupportedModel for one that could match forever: it
    repeats a group, or has too many repetitions."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadCheckpoint(
            f"{config.where}: {pattern!r} is no regular expression ({error})", param="pattern"
        ) from None
    if (
        re.search(r"\)[*+{]", pattern)
        or len(re.findall("[*+{]", pattern)) > _MAX_REPEATS
        or len(pattern) > _MAX_PATTERN
    ):
        raise UnsupportedModel(
            f"{config.where}: the pattern {pattern!r} is not served: it may have {_MAX_PATTERN} letters, repeat "
            f"{_MAX_REPEATS} times, and no group",
            param="pattern",
        )


_AGAIN = "Quantise the model again with AutoAWQ's version 'gemm', or give --model the one that it was made from"


def read_awq(config: Fields) -> WeightFormat:
    """AutoAWQ's older quant_config.json has w_bit and q_group_size. `settings` is the size of a group."""
    bits_of(config, (4,), "bits" if "bits" in config or "w_bit" not in config else "w_bit", default=4)
    layout = "version" if "version" in config else "format"
    if config.text_or(layout, "gemm").lower() != "gemm":
        raise config.unserved(layout, "version 'gemm' is", fix=_AGAIN)
    if config.text_or("backend", "autoawq") == "llm-awq":
        raise config.unserved("backend", "checkpoints of AutoAWQ are", fix=_AGAIN)
    if not config.flag("zero_point", default=True):
        raise config.unserved("zero_point", "AWQ with zero points is", fix=_AGAIN)
    size = "q_group_size" if "q_group_size" in config and "group_size" not in config else "group_size"
    group_size = group_size_of(config, size, default=128)
    return WeightFormat(label=f"awq-int4{group_label(group_size)}", encodings="awq:encodings", settings=group_size)


def read_bitsandbytes(config: Fields) -> WeightFormat:
    """Reads the config. The `settings` of int8 are the threshold of unrounded inputs; None: all are rounded."""
    in_8, in_4 = (config.flag(name) or config.flag(f"_{name}") for name in ("load_in_8bit", "load_in_4bit"))
    if in_8 == in_4:
        raise config.unserved("load_in_8bit", "one of load_in_8bit and load_in_4bit is true")
    if in_8:
        threshold = config.number_or("llm_int8_threshold", 6.0, above=-1.0)
        outliers_from = threshold if threshold > 0 else None
        return WeightFormat(label="bitsandbytes-int8", encodings="bitsandbytes:int8_encodings", settings=outliers_from)
    if config.text_or("bnb_4bit_quant_type", "fp4") != "nf4":
        raise config.unserved("bnb_4bit_quant_type", "'nf4' is")
    require_value(config, "bnb_4bit_quant_storage", ("uint8",))
    return WeightFormat(label="bitsandbytes-nf4", encodings="bitsandbytes:nf4_encodings")


def read_exl2(config: Fields) -> WeightFormat:
    return WeightFormat(label=f"exl2-{config.number_or('bits', 0.0):g}bpw", encodings="exl2:encodings")


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Settings:
    block: tuple[int, int] | None  # rows and inputs of a scale; None: one scale a tensor
    static: bool  # activations have a stored scale


def read_fp8(config: Fields) -> WeightFormat:
    require_value(config, "fmt", ("e4m3", "float8_e4m3fn"))
    require_value(config, "activation_scheme", ("dynamic", "static"))
    require_value(config, "scale_fmt", ("ue8m0", "float"))
    block = config.raw("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and 0 < size < 1 << 31 for size in block)
    ):
        raise config.wrong("weight_block_size", "two sizes, as [128, 128]")
    static = config.text_or("activation_scheme", "dynamic") == "static"
    return WeightFormat(
        label="fp8" if block is None else f"fp8-block{block[0]}x{block[1]}",
        encodings="fp8:encodings",
        settings=FP8Settings(block=None if block is None else (block[0], block[1]), static=static),
    )


def read_gguf(config: Fields) -> WeightFormat:
    """Reads the config. `type` is the type of most weights; the file lists each."""
    return WeightFormat(label=f"gguf-{config.text_or('type', '')}", encodings="gguf:encodings")


_GPTQ_BITS = (2, 3, 4, 8)
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # checkpoint_format: what is added to a stored zero


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQSizes:
    """`overrides` are other sizes for layers whose name matches a pattern, the first that does."""

    bits: int
    group_size: int | None  # None: all inputs are one group
    zero_offset: int
    overrides: tuple[tuple[str, GPTQSizes], ...] = ()

    def of_layer(self, name: str) -> GPTQSizes:
        for pattern, other in self.overrides:
            if re.match(pattern, name):
                return other
        return replace(self, overrides=())


def read_gptq(config: Fields) -> WeightFormat:
    layout = "checkpoint_format" if "checkpoint_format" in config else "format"
    version = config.text_or(layout, "gptq")
    if version not in _ZERO_OFFSETS or config.flag("is_marlin_format"):
        field = layout if version not in _ZERO_OFFSETS else "is_marlin_format"
        raise config.unserved(field, "checkpoint_format 'gptq' and 'gptq_v2' are")
    sizes = GPTQSizes(
        bits=bits_of(config, _GPTQ_BITS),
        group_size=group_size_of(config, default=128),
        zero_offset=_ZERO_OFFSETS[version],
    )
    overrides = tuple(_overrides(config, sizes))
    return WeightFormat(
        label=f"gptq-int{sizes.bits}{group_label(sizes.group_size)}{'-mixed' if overrides else ''}",
        encodings="gptq:encodings",
        settings=replace(sizes, overrides=overrides),
    )


def _overrides(config: Fields, whole: GPTQSizes) -> list[tuple[str, GPTQSizes]]:
    """Reads `dynamic`. Layers with a pattern "-:..." are stored as floats."""
    rules, overrides = config.inner("dynamic"), []
    for key in rules.names():
        pattern, excluded = key.removeprefix("+:").removeprefix("-:"), key.startswith("-:")
        check_pattern(pattern, rules)
        if excluded:
            overrides.append((pattern, whole))
            continue
        rule = rules.inner(key)
        bits = bits_of(rule, _GPTQ_BITS, default=whole.bits)
        size = group_size_of(rule) if "group_size" in rule else whole.group_size
        overrides.append((pattern, replace(whole, bits=bits, group_size=size)))
    return overrides


def read_mxfp4(config: Fields) -> WeightFormat:
    """The files show which layers are quantised: gpt-oss's experts."""
    return WeightFormat(label="mxfp4", encodings="mxfp4:encodings")


Levels = Literal["int8", "int4", "fp8"]
Quantize = Literal["off", "int8", "int4", "fp8"]
GROUP = 128
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedLayers:
    """Integers by groups of 128 inputs, fp8 by rows. The head is rounded too, to int8 where the others are int4: a
    tied one is a copy beside the embedding, which stays in floating point."""

    levels: Levels

    def of_layer(self, name: str) -> Levels:
        return "int8" if name in (HEAD, EMBEDDING) and self.levels == "int4" else self.levels

    def num_bytes(self, name: str, num_outputs: int, num_inputs: int) -> int:
        """The bytes of a layer whose scales have two bytes. `name`: of a tied head or its embedding."""
        levels = self.of_layer(name)
        groups = 1 if levels == "fp8" else -(-num_inputs // GROUP)
        return num_outputs * (-(-num_inputs * (4 if levels == "int4" else 8) // 8) + 2 * groups)


def rounded_format(levels: Levels, stored: WeightFormat | None) -> WeightFormat:
    """The format of float weights that are rounded at load (`worker.quantize`). Raises Misconfigured for a quantised
    checkpoint."""
    if stored is not None:
        raise Misconfigured(
            f"worker.quantize is {levels}, the checkpoint is quantised already ({stored.label}): leave one out",
            param="quantize",
        )
    return WeightFormat(
        label=f"rounded-{levels}" + ("" if levels == "fp8" else f"-g{GROUP}"),
        encodings="rounded:encodings",
        settings=RoundedLayers(levels=levels),
    )
