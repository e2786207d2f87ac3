"""Where adapters meet a model: its linear layers that can have one, and the table of those that are loaded.

Legend: I inputs, O outputs, R rank of the adapter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from protos.errors import BadCheckpoint, BatonError, Misconfigured
from workers.adapters.adapter_files import AdapterFiles, AdapterTensors, ModuleShape, read_adapter
from workers.adapters.low_rank import LinearAdapters, LowRankPart, LowRankUpdate, StepAdapters
from workers.free_memory import free_ram_bytes
from workers.weights.encoding import LayerContext, Projection, WeightShare
from workers.weights.formats.float_matrix import FloatMatrix
from workers.weights.slots import in_order

log = logging.getLogger("baton.worker")


class AdaptableLinear(Protocol):
    """This rank's share of a linear layer. `adapters` stays None until the first one is loaded."""

    adapters: LinearAdapters | None

    @property
    def share(self) -> WeightShare: ...


class AdaptableDecoder(Protocol):
    """The part of `Decoder` that adapters need. A decoder without such layers serves none."""

    @property
    def context(self) -> LayerContext: ...
    @property
    def step_adapters(self) -> StepAdapters: ...
    def linears(self) -> Iterable[AdaptableLinear]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """`rank`: its matrices' largest; `num_bytes`: their memory on this rank of the worker."""

    adapter_id: str
    rank: int
    num_bytes: int


class AdapterTable:
    """The adapters of one rank. Every rank loads and unloads the same ones, in the same order."""

    def __init__(self, decoder: AdaptableDecoder, *, max_adapters: int) -> None:
        self._decoder = decoder
        self._max_adapters = max_adapters
        self._linears = tuple(decoder.linears())
        self._shapes = _shapes_of(self._linears)
        self.loaded: dict[str, LoadedAdapter] = {}  # by id

    def check(self, path: str) -> AdapterFiles:
        """Reads the adapter's files without changing anything. Callable from any thread. Raises as `read_adapter`."""
        files = read_adapter(path, self._shapes)
        with files.read() as tensors:
            for module in files.modules.values():
                for name, scale in ((module.down, 1.0), (module.up, module.scale)):
                    scaled = (tensors[name].float() * scale).to(self._decoder.context.dtype)
                    if not scaled.isfinite().all():
                        raise BadCheckpoint(
                            f"{files.folder}: tensor {name!r} times its scale {scale:g} is not finite: correct "
                            "'lora_alpha'",
                            param=name,
                        )
        return files

    def check_room(self, files: AdapterFiles) -> None:
        """Raises Misconfigured if there are too many adapters or too little memory."""
        if files.adapter_id in self.loaded:
            return
        if len(self.loaded) >= self._max_adapters:
            raise Misconfigured(
                f"{files.folder}: {len(self.loaded)} adapters are loaded: unload one, or raise max_adapters",
                param="max_adapters",
            )
        if self._decoder.context.device == "cpu" and files.num_bytes > free_ram_bytes():
            raise Misconfigured(
                f"{files.folder}: the adapter takes {files.num_bytes / 2**20:.0f} MiB, less is free: unload "
                "another one",
                param="adapters",
            )

    def load_adapter(self, path: str, adapter_id: str) -> LoadedAdapter:
        """Loads an adapter that rank 0 has checked, unless it is loaded. Raises as `read_adapter` on rank 0. On another
        rank an error ends the worker."""
        if (known := self.loaded.get(adapter_id)) is not None:
            return known
        start_s = time.perf_counter()
        try:
            files = read_adapter(path, self._shapes, adapter_id=adapter_id)
            num_bytes = self._install(files)
        except BatonError as error:
            if self._decoder.context.parallel.rank == 0:
                raise
            raise RuntimeError(f"rank 0 has read {path}, and this rank cannot: {error.message}") from error
        loaded = LoadedAdapter(
            adapter_id=adapter_id, rank=max(module.rank for module in files.modules.values()), num_bytes=num_bytes
        )
        self.loaded[adapter_id] = loaded
        log.info("the adapter %s is loaded in %.2f s: rank %d", path, time.perf_counter() - start_s, loaded.rank)
        return loaded

    def unload_adapter(self, adapter_id: str) -> None:
        """Drops an adapter that no row uses any more. Ignores an unknown one."""
        if self.loaded.pop(adapter_id, None) is None:
            return
        for linear in self._linears:
            if linear.adapters is not None:
                linear.adapters.updates.pop(adapter_id, None)

    def _install(self, files: AdapterFiles) -> int:
        num_bytes = 0
        with files.read() as tensors:
            for linear in self._linears:
                if any(part.name in files.modules for part in linear.share.projections):
                    update, size = _update_of(linear.share, files, tensors, self._decoder.context)
                    if linear.adapters is None:
                        linear.adapters = LinearAdapters(self._decoder.step_adapters)
                    linear.adapters.updates[files.adapter_id] = update
                    num_bytes += size
        return num_bytes


def _shapes_of(linears: Iterable[AdaptableLinear]) -> Mapping[str, ModuleShape]:
    return {
        part.name: ModuleShape(num_inputs=linear.share.total_inputs, num_outputs=part.total)
        for linear in linears
        for part in linear.share.projections
    }


def _update_of(
    share: WeightShare, files: AdapterFiles, tensors: AdapterTensors, context: LayerContext
) -> tuple[LowRankUpdate, int]:
    """This rank's part of a linear layer, and its bytes. Ranks that divide outputs divide B; ranks that divide inputs
    divide A, and add up partial sums with the layer's own."""
    inputs = slice(share.first_input, share.first_input + share.num_inputs)
    downs, parts = list[torch.Tensor](), list[LowRankPart]()
    first_output = first_rank = num_bytes = 0
    for projection in share.projections:
        if (module := files.modules.get(projection.name)) is not None:
            downs.append(tensors[module.down][:, inputs])
            up_OR = _rows_of(projection, tensors[module.up]).float() * module.scale
            parts.append(
                LowRankPart(
                    ranks=slice(first_rank, first_rank + module.rank),
                    outputs=slice(first_output, first_output + projection.size),
                    up_OR=_matrix(up_OR, context),
                )
            )
            first_rank += module.rank
            num_bytes += up_OR.numel() * context.dtype.itemsize
        first_output += projection.size
    down_RI = torch.cat(downs)
    num_bytes += down_RI.numel() * context.dtype.itemsize
    return LowRankUpdate(_matrix(down_RI, context), parts), num_bytes


def _rows_of(projection: Projection, up_OR: torch.Tensor) -> torch.Tensor:
    return in_order(up_OR[projection.start : projection.start + projection.size], projection.order)


def _matrix(weight_OI: torch.Tensor, context: LayerContext) -> FloatMatrix:
    matrix = FloatMatrix(weight_OI.to(device=context.device, dtype=context.dtype).contiguous())
    matrix.pack()
    return matrix
