"""Quantises a checkpoint of floats, one decoder layer at a time.

embed the calibration text ─▶ for each layer: run it and observe its inputs ─▶ round its weights ─▶ write them
                                             └─▶ run it with the rounded weights: the next layer's inputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from protos.errors import Misconfigured, UnsupportedModel
from protos.model_files.folder import FolderFiles
from protos.model_files.opening import open_model
from workers.kernels.cpu.products import PackedWeight
from workers.models.loader import with_stored_head
from workers.models.model_config import ModelConfig, read_config
from workers.quantise.awq_scales import InputSample, clipped_scales, fold_scales
from workers.quantise.gptq_levels import SecondMoments, gptq_levels
from workers.quantise.quantised_folder import QuantisedFolder
from workers.quantise.recipe import QuantiseRecipe
from workers.quantise.walk import LayerWalk, Sequences
from workers.weights.encoding import LayerContext, Matrix, WeightEncoding, WeightShare
from workers.weights.formats.float_matrix import FLOAT_ENCODING
from workers.weights.group_rounding import check_finite
from workers.weights.registry import encodings_of, open_source
from workers.weights.slots import Slot
from workers.weights.source import WeightSource

OnLayer = Callable[[int, int], None]
"""Called with the number of layers done, and of all."""

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
_UNCLIPPED = ("q_proj", "k_proj")  # AWQ's rule: these outputs are multiplied with each other

Tensors = dict[str, torch.Tensor]


_AS_LOADED = "set worker.quantize, which rounds the weights as they are loaded"


def check_float_folder(path: Path) -> ModelConfig:
    """Raises UnsupportedModel or BadCheckpoint for a model that cannot be quantised."""
    files, config = open_model(path), read_config(path)
    if not isinstance(files, FolderFiles):
        raise UnsupportedModel(f"{path} is a GGUF file: give the Hugging Face folder that it was made from")
    if config.weight_format is not None:
        raise UnsupportedModel(
            f"{path} is quantised already ({config.weight_format.label}): give a checkpoint of floats"
        )
    if not config.spec.stored_as_llama:
        raise UnsupportedModel(
            f"{path}: baton quantize does not know how {config.family} stores its weights: {_AS_LOADED}"
        )
    if config.experts is not None:
        raise UnsupportedModel(f"{path} is a mixture of experts, which baton quantize does not write: {_AS_LOADED}")
    return config


@torch.inference_mode()
def quantise(folder: Path, out: Path, recipe: QuantiseRecipe, calibration: Sequences, on_layer: OnLayer) -> None:
    """Writes the folder `out`. `calibration` has token ids; rounding to nearest needs none.

    Raises Misconfigured, UnsupportedModel or BadCheckpoint. Nothing is left of a folder that is not complete.
    """
    config = check_float_folder(folder)
    if recipe.calibrated and not any(len(sequence) > 1 for sequence in calibration):
        raise Misconfigured("the calibration text has no two tokens: give --calibrate a longer one", param="calibrate")
    with open_source(folder) as source, QuantisedFolder(out, folder) as written:
        walk = LayerWalk(folder, config, source, calibration)
        if recipe.calibrated:
            walk.embed()
        inputs_of: dict[str, int] = {}
        done: set[str] = set()
        for layer in range(config.num_layers):
            on_layer(layer, config.num_layers)
            tensors, replaced = _quantised_layer(walk, layer, recipe, source, inputs_of)
            written.add(tensors)
            done |= replaced
        for name in sorted(set(source.names()) - done):
            written.add({name: source.read(name, 0, slice(None))})
        read = FolderFiles(folder).json("config.json") or {}
        written.finish({**read, "quantization_config": recipe.config(inputs_of)})
        on_layer(config.num_layers, config.num_layers)


@torch.inference_mode()
def held_out_nats(folder: Path, sequences: Sequences) -> float:
    """Mean cross entropy a token of the model in `folder`, quantised or not, in nats."""
    with open_source(folder) as source:
        config = with_stored_head(folder, read_config(folder), source)
        encodings = encodings_of(config.weight_format, source)
        walk = LayerWalk(folder, config, source, sequences)
        walk.embed()
        for layer in range(config.num_layers):
            made = walk.make(layer, encodings)
            made.pack()
            walk.advance(made)
        return walk.nats(encodings)


def _quantised_layer(
    walk: LayerWalk, layer: int, recipe: QuantiseRecipe, source: WeightSource, inputs_of: dict[str, int]
) -> tuple[Tensors, set[str]]:
    prefix = f"model.layers.{layer}"
    observed: ObservedFloats[Any] = ObservedFloats(_OBSERVERS[recipe.method])
    made = walk.make(layer, observed.encoding_of)
    tensors = {slot.name: slot.target for slot in made.slots()}
    for names in observed.observers:
        inputs_of |= {name.removeprefix(f"{prefix}."): tensors[f"{name}.weight"].shape[1] for name in names}
    if recipe.calibrated:
        walk.run(made)
    observed.done()
    stored = {name: _DTYPES.get(source.describe(name).dtype, torch.float32) for name in tensors}
    written = _rounded(prefix, recipe, tensors, observed.observers, stored)
    if recipe.calibrated:
        walk.advance(made)
    return written, set(tensors)


def _rounded(
    prefix: str,
    recipe: QuantiseRecipe,
    tensors: Tensors,
    observers: Mapping[tuple[str, ...], Any],
    stored: Mapping[str, torch.dtype],
) -> Tensors:
    linear = {name: observer for names, observer in observers.items() for name in names}
    for name in linear:
        check_finite(f"{name}.weight", tensors[f"{name}.weight"])
    if recipe.method == "awq":
        fold_scales(prefix, tensors, observers, lambda name: recipe.rounding(tensors[f"{name}.weight"].shape[1]))
    written: Tensors = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if layer not in linear or layer == name:
            written[name] = tensor.to(stored[name])
            tensor.copy_(written[name])
            continue
        rounding, dtype = recipe.rounding(tensor.shape[1]), stored[name]
        scale_OG = rounding.scales(tensor, dtype)
        if recipe.method == "awq" and not layer.endswith(_UNCLIPPED):
            scale_OG = clipped_scales(tensor, linear[layer].rows(), rounding, dtype)
        scale_OI = rounding.spread(scale_OG, tensor.shape[1])
        levels_OI = (
            gptq_levels(tensor, linear[layer].moments_II, rounding, scale_OG)
            if recipe.method == "gptq"
            else rounding.levels(tensor, scale_OI)
        )
        written[f"{layer}.weight_packed"] = _words(rounding.codes(levels_OI))
        written[f"{layer}.weight_scale"] = scale_OG
        written[f"{layer}.weight_shape"] = torch.tensor(tensor.shape)
        tensor.copy_(levels_OI * scale_OI)
    return written


def _words(stream_OW: torch.Tensor) -> torch.Tensor:
    """Packs into int32, with zero bits at the end of a row."""
    rest = -stream_OW.shape[1] % 4
    return torch.nn.functional.pad(stream_OW, (0, rest)).contiguous().view(torch.int32)


class _Nothing:
    """The observer for rounding to nearest, which needs no inputs."""

    def __init__(self, num_inputs: int) -> None:
        pass

    def add(self, x_TI: torch.Tensor) -> None:
        pass


_OBSERVERS: Mapping[str, Callable[[int], Any]] = {"rtn": _Nothing, "gptq": SecondMoments, "awq": InputSample}


class InputObserver(Protocol):
    def add(self, x_TI: torch.Tensor) -> None: ...


AnyObserver = TypeVar("AnyObserver", bound=InputObserver)


class ObservedFloats(Generic[AnyObserver]):
    """`observers` are by the names of the projections that have an input in common. They see nothing once `done`."""

    def __init__(self, make: Callable[[int], AnyObserver]) -> None:
        self._make = make
        self.observers: dict[tuple[str, ...], AnyObserver] = {}
        self._done = False

    def encoding_of(self, name: str) -> WeightEncoding:
        return self

    def done(self) -> None:
        self._done = True

    def matrix(self, context: LayerContext, share: WeightShare, *, gated: bool = False) -> Matrix:
        observer = self._make(share.num_inputs)
        self.observers[tuple(projection.name for projection in share.projections)] = observer

        def observe(x_TI: torch.Tensor) -> None:
            if not self._done:
                observer.add(x_TI)

        return _ObservedMatrix(FLOAT_ENCODING.matrix(context, share, gated=gated), observe)


class _ObservedMatrix:
    def __init__(self, matrix: Matrix, observe: Callable[[torch.Tensor], None]) -> None:
        self._matrix = matrix
        self._observe = observe

    @property
    def packed_weight(self) -> PackedWeight | None:
        return None

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        self._observe(x_TI)
        return self._matrix(x_TI, bias_O)

    def before_gate(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        return self._matrix.before_gate(x_TI, bias_O)

    def pack(self) -> None:
        """Keeps the layout: the weight is replaced by its rounded values."""

    def dequantised(self) -> torch.Tensor:
        return self._matrix.dequantised()

    def slots(self) -> Iterator[Slot]:
        return self._matrix.slots()
