"""Reads a checkpoint's config for transformers' model of it, and traces that model: the weights are left alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.ends import end_ids
from protos.model_files.fields import Fields
from protos.model_files.opening import open_model
from workers.kernels.device_kernels import kernels_for
from workers.models.transformers.meta import build, config_of, named
from workers.models.transformers.sharing import (
    CannotShare,
    parameter_cuts,
    plan_of,
    replace_linears,
    style_of,
    unit_of,
)
from workers.models.transformers.tracing import Tracing, refused, trace
from workers.models.transformers.transformers_config import TransformersConfig
from workers.models.transformers.transformers_ropes import long_from
from workers.parallel.group import Solo
from workers.weights.encoding import LayerContext
from workers.weights.formats.float_matrix import only_floats
from workers.weights.registry import read_format
from workers.weights.weight_formats import Quantize, WeightFormat, rounded_format

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A model on the meta device, with the results of its pass. `linears` are used only as layers, so they can be
    replaced."""

    config: TransformersConfig
    model: Any
    linears: frozenset[str]
    weight_format: WeightFormat | None  # None: in floating point


_BUILDING = threading.Lock()
"""transformers makes models with settings of the whole process, such as torch's default dtype."""


def read_traced(path: str | Path, quantize: Quantize = "off", dtype: torch.dtype = torch.float32) -> TracedModel:
    """Raises BadCheckpoint or UnsupportedModel."""
    with _BUILDING:
        return _read(Path(path), quantize, dtype)


def _read(path: Path, quantize: Quantize, dtype: torch.dtype) -> TracedModel:
    files = open_model(path)
    fields = Fields.of_file(files, "config.json")
    name = named(fields)
    if not path.is_dir():
        raise refused(name, "it is no folder of a Hugging Face checkpoint")
    stored = read_format(fields, files)
    theirs, made = config_of(path, fields)
    model = build(theirs, made, name, dtype)
    with watched_linears(model) as watched:
        tracing, logits = trace(model, name)
    vocab_size = logits.shape[-1]
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < vocab_size:
        raise refused(name, f"it embeds {rows} tokens and predicts {vocab_size}")
    config = TransformersConfig(
        family=theirs.model_type,
        architecture=made.__name__,
        version=_version(),
        vocab_size=vocab_size,
        calls=tuple(tracing.calls),
        qkv_bias=any(_has_bias(module) for module in tracing.modules),
        max_position=_max_position(theirs, fields),
        dtype=fields.text_or("dtype", fields.text_or("torch_dtype", "float32")),
        eos_token_ids=end_ids(files, fields, vocab_size),
        tp_unit=1,
        why_one_rank="",
        long_from=long_from(theirs, _max_position(theirs, fields)),
    )
    _check_heads(name, config)
    linears = frozenset(watched.alone) - _tied(model)
    unit, why = _unit(theirs, made, name, model, config, linears)
    return TracedModel(
        config=replace(config, tp_unit=unit, why_one_rank=why),
        model=model,
        linears=linears,
        weight_format=stored if quantize == "off" else rounded_format(quantize, stored),
    )


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _tied(model: Any) -> set[str]:
    names = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    return {name.rpartition(".")[0] for name in names}


def _max_position(config: Any, fields: Fields) -> int:
    for field in _LENGTHS:
        value = getattr(config, field, None)
        if isinstance(value, int) and value > 0:
            return value
    raise BadCheckpoint(f"{fields.where}: set max_position_embeddings", param="max_position_embeddings")


def _has_bias(module: torch.nn.Module) -> bool:
    names = [name for name, each in module.named_parameters() if each.dim() == 1]
    return any(name.endswith(".bias") and module.get_parameter(f"{name[:-4]}weight").dim() == 2 for name in names)


def _check_heads(name: str, config: TransformersConfig) -> None:
    """Layers with fewer key heads repeat them: the cache has equally many in each layer."""
    for call in config.calls:
        if config.num_kv_heads % call.num_kv_heads or call.num_heads % config.num_kv_heads:
            raise refused(
                name, f"a layer's {call.num_kv_heads} key/value heads cannot become the {config.num_kv_heads} of others"
            )


def _unit(
    theirs: Any, made: type[Any], name: str, model: Any, config: TransformersConfig, linears: frozenset[str]
) -> tuple[int, str]:
    """Returns the number that the ranks must divide, found by cutting the model for two ranks; or 1, and the reason."""
    try:
        unit = unit_of(model, config.calls, linears)
        ranks = next((count for count in range(2, unit + 1) if unit % count == 0), None)
        if ranks is None:
            return unit, ""
        half = build(theirs, made, name, torch.float32)
        share(half, meta_context(_Mute(ranks)), linears)
        tracing, _ = trace(half, name)
    except CannotShare as error:
        return 1, str(error)
    except UnsupportedModel as error:
        return 1, f"its layers cannot be cut: {error}"
    return _agreed(config, tracing, unit, ranks)


def _agreed(config: TransformersConfig, tracing: Tracing, unit: int, ranks: int) -> tuple[int, str]:
    for whole, part in zip(config.calls, tracing.calls, strict=True):
        if (part.num_heads, part.num_kv_heads) not in (
            (whole.num_heads, whole.num_kv_heads),
            (whole.num_heads // ranks, whole.num_kv_heads // ranks),
        ):
            return 1, (
                f"a rank of {ranks} has {part.num_heads} of {whole.num_heads} heads and {part.num_kv_heads} of "
                f"{whole.num_kv_heads} key/value heads in transformers' plan"
            )
    return unit, ""


def share(model: Any, context: LayerContext, linears: frozenset[str]) -> None:
    """Cuts a model on the meta device for a rank, without weights."""
    plan = plan_of(model)
    replace_linears(model, context, linears, {name: style_of(plan, name) for name in linears})
    parallel = context.parallel
    for name, cut in parameter_cuts(model).items():
        parent, _, attribute = name.rpartition(".")
        part = cut.of(model.get_parameter(name), parallel.rank, parallel.size)
        setattr(model.get_submodule(parent), attribute, torch.nn.Parameter(part, requires_grad=False))


def meta_context(parallel: Any) -> LayerContext:
    return LayerContext(
        device="meta",
        dtype=torch.float32,
        parallel=parallel,
        kernels=kernels_for("cpu"),
        encodings=only_floats,
    )


class _Mute(Solo):
    """A rank of several that has no others: for shapes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.size, dim=-1)


class WatchedLinear(torch.nn.Linear):
    """Notes whether it is called, and whether its weight is read outside of a call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["inside"] = True
        try:
            return super().forward(x)
        finally:
            self.__dict__.update(inside=False, called=True)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias") and not self.__dict__.get("inside"):
            self.__dict__["read"] = True
        return super().__getattr__(name)


class WatchedLinears:
    def __init__(self) -> None:
        self.alone: set[str] = set()
        """Names of the layers, once they are no longer watched."""


@contextmanager
def watched_linears(model: torch.nn.Module) -> Iterator[WatchedLinears]:
    linears = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    result = WatchedLinears()
    for module in linears.values():
        module.__class__ = WatchedLinear
    try:
        yield result
    finally:
        for name, module in linears.items():
            module.__class__ = torch.nn.Linear
            notes = module.__dict__
            if notes.pop("called", False) and not notes.pop("read", False):
                result.alone.add(name)
            notes.pop("inside", None)
            notes.pop("read", None)
