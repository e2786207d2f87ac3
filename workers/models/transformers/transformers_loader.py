"""Reads a checkpoint's weights into a model of transformers. Names and shapes are checked before the first is read."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from protos.errors import BadCheckpoint
from workers.kernels.cpu.regions import return_freed_memory, trim_freed_memory
from workers.kernels.device_kernels import kernels_for
from workers.models.filling import LoadPart, PartLoader, Progress, check_slots, ignore_progress, log_unused
from workers.models.loader import dtype_named, same_tensors
from workers.models.transformers.reading import TracedModel, read_traced
from workers.models.transformers.sharing import (
    ParameterCut,
    parameter_cuts,
    plan_of,
    replace_linears,
    style_of,
    sum_experts,
)
from workers.models.transformers.tracing import refused
from workers.models.transformers.transformers_decoder import TransformersDecoder
from workers.models.transformers.transformers_linear import MatrixLinear
from workers.models.transformers.transformers_names import ConvertedSource
from workers.parallel.group import Solo, TensorParallel
from workers.weights.encoding import LayerContext
from workers.weights.registry import encodings_of
from workers.weights.safetensors import open_safetensors
from workers.weights.slots import Slot
from workers.weights.weight_formats import Quantize

log = logging.getLogger("baton.worker")


def load_transformers(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    quantize: Quantize = "off",
    parallel: TensorParallel | None = None,
    on_progress: Progress | None = None,
    packed: bool = False,
) -> TransformersDecoder:
    """The checkpoint folder `path` as a decoder whose layers transformers computes; arguments as `load_model`'s.

    Raises BadCheckpoint, UnsupportedModel or Misconfigured.
    """
    folder, parallel = Path(path), parallel or Solo()
    if device == "cpu":
        return_freed_memory()
    traced = read_traced(folder, quantize, dtype_named(dtype))
    traced.config.check_parallel(parallel.size, "tp", expert_parallel=False)
    model = traced.model
    with open_safetensors(folder, as_stored=True) as files:
        source = ConvertedSource(model, files, str(folder))
        context = LayerContext(
            device=device,
            dtype=dtype_named(dtype),
            parallel=parallel,
            kernels=kernels_for(device),
            encodings=encodings_of(traced.weight_format, source),
        )
        _tie_as_stored(folder, model, source)
        _make_buffers(model, context.device, traced.config.architecture)
        parts = _checked(folder, traced, context, source)
        if not packed:
            parts = [LoadPart(slots=part.slots) for part in parts]
        stored_as = _stored_as(traced, source)
        log.info("%s: %s", folder, stored_as)
        PartLoader(folder, source).load(parts, on_progress or ignore_progress, num_threads=1)
    model.tie_weights(recompute_mapping=False)
    _check_complete(folder, model)
    if device == "cpu":
        trim_freed_memory()
    return TransformersDecoder(model, traced.config, context, stored_as=stored_as)


def _tie_as_stored(folder: Path, model: Any, source: ConvertedSource) -> None:
    """Unties weights that differ, as transformers does; of a tied pair the stored one is read."""
    names = set(source.names())
    for tied, shared in list(model.all_tied_weights_keys.items()):
        if tied in names and shared not in names:
            source.rename(tied, shared)
        elif tied in names and not same_tensors(source, tied, shared):
            log.warning("%s: config.json ties %s to %s, which differs: it is not tied", folder, tied, shared)
            del model.all_tied_weights_keys[tied]
            parent, _, attribute = tied.rpartition(".")
            own = torch.nn.Parameter(torch.empty_like(model.get_parameter(shared)), requires_grad=False)
            setattr(model.get_submodule(parent), attribute, own)


def _make_buffers(model: Any, device: str, name: str) -> None:
    """Allocates the buffers, and lets the model compute those that no checkpoint has, such as a rope's frequencies.
    Raises UnsupportedModel for a buffer that the model does not set."""
    persistent = set(model.state_dict())
    made: list[tuple[str, torch.Tensor]] = []
    for full_name, buffer in list(model.named_buffers()):
        parent, _, attribute = full_name.rpartition(".")
        new = torch.empty_like(buffer, device=device)
        new.fill_(float("nan") if new.is_floating_point() else False if new.dtype == torch.bool else -1)
        model.get_submodule(parent)._buffers[attribute] = new
        if full_name not in persistent:
            made.append((full_name, new))
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    with torch.no_grad():
        model.initialize_weights()
    unset = [
        full_name
        for full_name, new in made
        if bool((new != new).any() if new.is_floating_point() else (new == -1).any())
    ]
    if unset:
        raise refused(name, f"transformers leaves its buffer {unset[0]} unset")


def _checked(folder: Path, traced: TracedModel, context: LayerContext, source: ConvertedSource) -> list[LoadPart]:
    model, parallel = traced.model, context.parallel
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    cuts: dict[str, ParameterCut] = {}
    styles: dict[str, str] = {}
    if parallel.size > 1:
        plan = plan_of(model)
        cuts, styles = parameter_cuts(model), {name: style_of(plan, name) for name in traced.linears}
        sum_experts(model, parallel)
    slots: list[Slot] = []
    replace_linears(model, context, traced.linears, styles)
    linears = [module for module in model.modules() if isinstance(module, MatrixLinear)]
    tied = set(model.all_tied_weights_keys)
    for name, parameter in list(model.named_parameters()):
        if name not in tied:  # parameters of a MatrixLinear are not tied
            slots += _slots_of(model, name, parameter, cuts.get(name), context)
    names = source.names()
    slots += [
        Slot(name=name, shape=tuple(buffer.shape), target=buffer)
        for name, buffer in model.named_buffers()
        if name in names
    ]
    of_linears = [slot for module in linears for slot in module.slots()]
    _check_slots(folder, traced, [*of_linears, *slots], source, shapes, tied)
    others = [LoadPart(slots=partial(iter, [slot])) for slot in slots]
    return [*(LoadPart(slots=module.slots, pack=module.pack) for module in linears), *others]


def _slots_of(
    model: Any, name: str, parameter: torch.Tensor, cut: ParameterCut | None, context: LayerContext
) -> list[Slot]:
    """Allocates this rank's share of a parameter, and returns its slots."""
    parallel = context.parallel
    local = parameter if cut is None else cut.of(parameter, parallel.rank, parallel.size)
    target = torch.empty_like(local, device=context.device)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, torch.nn.Parameter(target, requires_grad=False))
    shape = tuple(parameter.shape)
    if cut is None:
        return [Slot(name=name, shape=shape, target=target)]
    size = cut.size(parameter) // parallel.size
    return [
        Slot(
            name=name,
            shape=shape,
            target=part,
            dim=cut.dim,
            start=half * shape[cut.dim] // cut.halves + parallel.rank * size,
        )
        for half, part in enumerate(torch.split(target, size, dim=cut.dim))
    ]


def _check_slots(
    folder: Path,
    traced: TracedModel,
    slots: list[Slot],
    source: ConvertedSource,
    shapes: dict[str, tuple[int, ...]],
    tied: set[str],
) -> None:
    names = set(source.names())
    note = " This layer cannot be read in a quantised form." if traced.weight_format else ""
    check_slots(folder, slots, source, note=note)
    unused = sorted((names - {slot.name for slot in slots} - tied) | set(source.unnamed()))
    ignored = ("rotary_emb.inv_freq", ".attn.bias", ".masked_bias")
    log_unused(folder, [name for name in unused if not name.endswith(ignored)])


def _check_complete(folder: Path, model: Any) -> None:
    left = [
        name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.device.type == "meta"
    ]
    if left:
        raise BadCheckpoint(f"{folder} lacks the tensor {left[0]!r}: a shard is missing")


def _stored_as(traced: TracedModel, source: ConvertedSource) -> str:
    dtypes = sorted({source.describe(name).dtype for name in source.names() if name.endswith("weight")})
    label = traced.weight_format.label if traced.weight_format else "-".join(dtypes)
    config = traced.config
    return f"{label}, layers by transformers {config.version} ({config.architecture})"
