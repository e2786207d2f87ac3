"""compressed-tensors, as llm-compressor writes it: packed integers, int8 and fp8, with activations rounded or not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from protos.model_files.fields import Fields
from workers.weights.weight_formats import (
    WeightFormat,
    bits_of,
    check_pattern,
    group_label,
    group_size_of,
    require_value,
)

Strategy = Literal["tensor", "channel", "group", "block"]

_PACKED, _INT, _FLOAT, _NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
_STRATEGIES: dict[str, tuple[Strategy, ...]] = {
    _PACKED: ("tensor", "channel", "group"),
    _INT: ("tensor", "channel", "group"),
    _FLOAT: ("tensor", "channel", "group", "block"),
}
_REGEX = "re:"
_CLASSES = ("Linear",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationScheme:
    levels: Literal["int8", "fp8"]
    static: bool
    symmetric: bool
    group: int | None  # None: the whole token


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScheme:
    """How the layers of one config group are stored."""

    packed: bool
    levels: Literal["int", "fp8"]
    bits: int
    strategy: Strategy
    group_size: int  # inputs of a scale, of the strategies that have groups or blocks
    block_rows: int
    symmetric: bool
    activations: ActivationScheme | None

    @property
    def label(self) -> str:
        of_scale = group_label(self.group_size) if self.strategy == "group" else f"-{self.strategy}"
        activations = "" if self.activations is None else f"-a8{'-static' if self.activations.static else ''}"
        return f"{'int' if self.levels == 'int' else 'fp'}{self.bits}{of_scale}{activations}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedLayers:
    """`schemes` are by target: a layer's name, "re:" and a pattern, or a class. `ignored` layers are floats."""

    schemes: tuple[tuple[str, LayerScheme], ...]
    ignored: tuple[str, ...]

    @property
    def label(self) -> str:
        schemes = list(dict.fromkeys(scheme for _, scheme in self.schemes))
        return f"compressed-tensors-{schemes[0].label}{'-mixed' if len(schemes) > 1 else ''}"

    def of_layer(self, name: str) -> LayerScheme | None:
        """Returns None for a layer in floating point. An exact name precedes patterns, and these precede classes."""
        if any(_matches(name, target) for target in self.ignored):
            return None
        for kind in (0, 1, 2):
            for target, scheme in self.schemes:
                if _kind(target) == kind and _matches(name, target):
                    return scheme
        return None


def read_compressed(config: Fields) -> WeightFormat:
    """Raises UnsupportedModel or BadCheckpoint."""
    default = config.text_or("format", _PACKED)
    if config.inner("sparsity_config").text_or("format", "dense") != "dense":
        raise config.unserved("sparsity_config", "dense weights are")
    if config.inner("transform_config").raw("config_groups"):
        raise config.unserved("transform_config", "weights without transforms are")
    groups, ignored = config.inner("config_groups"), config.texts("ignore")
    schemes: list[tuple[str, LayerScheme]] = []
    for name in groups.names():
        group = groups.inner(name)
        scheme = _scheme(group, "format" if "format" in group else "", group.text_or("format", default), config)
        schemes.extend((target, scheme) for target in group.texts("targets"))
    for target in (*ignored, *(target for target, _ in schemes)):
        if target.startswith(_REGEX):
            check_pattern(target.removeprefix(_REGEX), config)
    if not schemes:
        raise config.unserved("config_groups", "at least one group with targets and weights is")
    layers = CompressedLayers(schemes=tuple(schemes), ignored=ignored)
    return WeightFormat(label=layers.label, encodings="compressed_tensors:encodings", settings=layers)


def _scheme(group: Fields, own: str, layout: str, config: Fields) -> LayerScheme:
    if layout not in (_PACKED, _INT, _FLOAT, _NAIVE):
        where, field = (group, own) if own else (config, "format")
        raise where.unserved(field, f"{_PACKED}, {_INT}, {_FLOAT} and {_NAIVE} are")
    if group.inner("output_activations").names():
        raise group.unserved("output_activations", "null is")
    weights = group.inner("weights")
    is_float = weights.text_or("type", "int") == "float"
    require_value(weights, "type", ("int", "float"))
    require_value(weights, "dynamic", (False,))
    if layout == _NAIVE:
        layout = _FLOAT if is_float else _INT
    if is_float != (layout == _FLOAT):
        raise weights.unserved("type", f"format {layout} has weights of type {'int' if is_float else 'float'}")
    bits = bits_of(weights, (4, 8) if layout == _PACKED else (8,), "num_bits", default=8)
    size = group_size_of(weights) if "group_size" in weights else None
    named = weights.text_or("strategy", "tensor" if size is None else "group")
    if named not in _STRATEGIES[layout]:
        raise weights.unserved("strategy", f"with format {layout} {', '.join(_STRATEGIES[layout])} are")
    strategy: Strategy = next(each for each in _STRATEGIES[layout] if each == named)
    rows, width = _block(weights) if strategy == "block" else (1, size or 1)
    if strategy == "group" and size is None:
        raise weights.unserved("group_size", "with strategy group a number above 0 is")
    symmetric = weights.flag("symmetric", default=True)
    if is_float and not symmetric:
        raise weights.unserved("symmetric", "with fp8 true is")
    return LayerScheme(
        packed=layout == _PACKED,
        levels="fp8" if is_float else "int",
        bits=bits,
        strategy=strategy,
        group_size=width,
        block_rows=rows,
        symmetric=symmetric,
        activations=_activations(group, layout),
    )


def _activations(group: Fields, layout: str) -> ActivationScheme | None:
    stored = group.inner("input_activations")
    if not stored.names():
        return None
    wanted = "float" if layout == _FLOAT else "int"
    require_value(stored, "type", (wanted,))
    bits_of(stored, (8,), "num_bits", default=8)
    dynamic = stored.flag("dynamic")
    if layout == _PACKED:
        raise group.unserved("input_activations", f"with format {layout} null is")
    symmetric = stored.flag("symmetric", default=True)
    if not symmetric and (dynamic or wanted == "float"):
        raise stored.unserved("symmetric", "dynamic and fp8 activations are symmetric")
    require_value(stored, "strategy", ("token", "group") if dynamic else ("tensor",))
    group_size = group_size_of(stored) if stored.raw("strategy") == "group" else None
    return ActivationScheme(
        levels="fp8" if wanted == "float" else "int8", static=not dynamic, symmetric=symmetric, group=group_size
    )


def _block(weights: Fields) -> tuple[int, int]:
    stored = weights.raw("block_structure")
    sizes = stored.split("x") if isinstance(stored, str) else stored
    if isinstance(sizes, list) and len(sizes) == 2 and all(str(size).isdecimal() for size in sizes):
        rows, width = (min(int(str(size)[:9]), 1 << 31) for size in sizes)
        if rows and width:
            return rows, width
    raise weights.unserved("block_structure", "two sizes, as [128, 128], are")


def _kind(target: str) -> int:
    return 1 if target.startswith(_REGEX) else 2 if target in _CLASSES else 0


def _matches(name: str, target: str) -> bool:
    if target.startswith(_REGEX):
        return re.match(target.removeprefix(_REGEX), name) is not None
    return name == target or target in _CLASSES
