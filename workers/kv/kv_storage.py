"""The tensors behind the block ids: one rank's share of a worker's KV cache. Who owns which block is not known here.

Legend: L layers of a group, P parts, NB blocks, K heads of this rank, BS positions of a block, W elements of a head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from kvtransfer.reshard import Cut, heads_of
from protos.values import LATENT, SCALE, KVLayout, KVPart
from workers.kernels.cpu.regions import roomy_zeros
from workers.kernels.device_kernels import KVScales, kernels_for
from workers.kernels.this_device import to_device
from workers.kv.kinds import FP8
from workers.worker_config import MAX_STEPS_IN_FLIGHT

_cuda: Any = torch.cuda  # a CPU build of torch has not all of its types

MAX_MARKS = MAX_STEPS_IN_FLIGHT + 2  # steps that concurrent reads distinguish: a complete one, and all in flight

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "float8_e4m3fn": torch.uint8,  # as bytes: neither gloo nor every function of torch takes it
}


class KVStorage:
    """One rank's share of a layout. Parts that have one shape are a tensor, [L, P, NB, K, BS, W]: keys and values of a
    dense model are the only one, with P = 2.

    All groups have the same parts, and share the tensors: row l is layer l of each group, and an id is a page of one
    group. `num_blocks` counts pages.

    Heads stand before positions: a range of a block's heads, which is what a worker with another degree of tensor
    parallelism needs, is contiguous. Zeroed at the start, so that what was never written is finite. `fp8_scales` has
    those of a cache in fp8 by layer (`workers.kernels.device_kernels.KVScales`); a layer without is not scaled. KV of a
    head that drafts lies in a storage of its own, `beside`, with a page for each page: payloads carry both.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_blocks: int,
        device: str = "cpu",
        fp8_scales: Mapping[int, KVScales] | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_heads = len(heads_of(layout, 0))
        self.device = torch.device(device)
        self._kernels = kernels_for(device)
        (parts,) = {group.parts for group in layout.groups}
        self._stacks = _alike(parts)
        self.tensors = tuple(self._zeros(stack) for stack in self._stacks)
        self._fp8_scales = {
            layer: (keys.to(device), values.to(device)) for layer, (keys, values) in (fp8_scales or {}).items()
        }
        self._views = {
            (layer, part.name): _as_typed(tensor[row, column], part)
            for stack, tensor in zip(self._stacks, self.tensors, strict=True)
            for group in layout.groups
            for row, layer in enumerate(group.layers)
            for column, part in enumerate(stack)
        }
        self._aside = _cuda.Stream(device) if self.device.type == "cuda" else None
        self._marks: deque[Any] = deque(maxlen=MAX_MARKS)
        self.beside: KVStorage | None = None

    @property
    def data(self) -> torch.Tensor:
        """The only tensor, of a cache whose parts have one shape."""
        (data,) = self.tensors
        return data

    @property
    def block_bytes(self) -> int:
        """Bytes of one page on this rank: of a block, if the layers are one group."""
        return self.num_bytes // self.num_blocks

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def part(self, layer: int, name: str) -> torch.Tensor:
        return self._views[layer, name]

    def keys_values(self, layer: int, value_dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Views, [blocks, heads, block size, ...]. Of a latent the first `value_dim` elements are the value."""
        if value_dim is None:
            return self.keys(layer), self.values(layer)
        latents = self.part(layer, LATENT)
        return latents, latents[..., :value_dim]

    def is_latent(self, layer: int) -> bool:
        return (layer, LATENT) in self._views

    def keys(self, layer: int) -> torch.Tensor:
        return self.part(layer, "key")

    def values(self, layer: int) -> torch.Tensor:
        return self.part(layer, "value")

    def scales(self, layer: int) -> KVScales | None:
        """Scales of keys and values in 8 bits; None if they are not rounded."""
        if (layer, f"key{SCALE}") in self._views:
            return self.part(layer, f"key{SCALE}").squeeze(-1), self.part(layer, f"value{SCALE}").squeeze(-1)
        if self.layout.kv_dtype != FP8:
            return None
        if layer not in self._fp8_scales:
            ones_K = torch.ones(self.num_heads, device=self.device)
            self._fp8_scales[layer] = ones_K, ones_K
        return self._fp8_scales[layer]

    def gather(
        self, block_ids: Sequence[int], out: torch.Tensor | None = None, *, of: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Copies the blocks of `data`, or of another one of `tensors`, into a contiguous [L, P, len(block_ids), K, BS,
        W], `out` if given."""
        return self._kernels.gather(self.data if of is None else of, self._ids(block_ids), out)

    def scatter(self, block_ids: Sequence[int], payload: torch.Tensor, *, of: torch.Tensor | None = None) -> None:
        """Writes what `gather` gave (here or on a worker with the same layout) into other blocks."""
        data = self.data if of is None else of
        expected = (*data.shape[:2], len(block_ids), *data.shape[3:])
        assert payload.shape == expected, f"payload {tuple(payload.shape)} does not fit {expected}"
        assert payload.dtype == data.dtype, f"payload is {payload.dtype}, the cache {data.dtype}"
        self.touch()
        self._kernels.scatter(data, self._ids(block_ids), payload.to(data.device))

    def warm(self) -> None:
        """Compiles the copies of blocks, before a transfer waits for them."""
        for tensor in self.tensors:
            self.scatter((0,), self.gather((0,), of=tensor), of=tensor)

    def read(self, cut: Cut, stage: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The payload of a cut (`kvtransfer.reshard`), flat, in memory that `stage(num_bytes)` gives."""
        payload = stage(self._num_bytes(cut)).view(self._payload_dtype(cut))
        for part, view, rows in self._pieces(cut, payload):
            self._kernels.gather(view, rows, part)
        return payload

    def attach(self, beside: KVStorage) -> None:
        """Adds the contents of `beside` to payloads of cuts `with_head`."""
        assert beside.num_blocks >= self.num_blocks
        self.beside = beside

    def write(self, cut: Cut, payload: torch.Tensor) -> None:
        dtype = self._payload_dtype(cut)
        assert payload.dtype == dtype, f"payload is {payload.dtype}, the cache {dtype}"
        assert payload.nbytes == self._num_bytes(cut), f"payload of {payload.nbytes} bytes does not fit {cut}"
        self.touch()
        for part, view, rows in self._pieces(cut, payload):
            self._kernels.scatter(view, rows, part)

    def mark(self) -> None:
        """A step has written, or queued, all its keys and values."""
        if self._aside is not None:
            event = _cuda.Event()
            event.record()
            self._marks.append(event)

    def touch(self) -> None:
        """Blocks were written, or queued to be written, outside of a step: later reads must be ordered after it."""
        self._marks.clear()

    @contextmanager
    def aside(self, num_in_flight: int | None = None) -> Iterator[None]:
        """Reads on a CUDA stream of their own, ordered after all work queued now; or, if no pending step writes these
        blocks, before the last `num_in_flight` steps. The computation does not wait until `rejoin`."""
        if self._aside is None:
            yield
            return
        if self.beside is None and num_in_flight is not None and num_in_flight < len(self._marks):
            self._aside.wait_event(self._marks[-1 - num_in_flight])
        else:
            self._aside.wait_stream(_cuda.current_stream())
        with _cuda.stream(self._aside):
            yield

    def rejoin(self) -> None:
        """From here on the computation may write into blocks that were read concurrently."""
        if self._aside is not None:
            _cuda.current_stream().wait_stream(self._aside)

    def _payload_dtype(self, cut: Cut) -> torch.dtype:
        return torch.uint8 if len(self.tensors) > 1 or cut.with_head else self.tensors[0].dtype

    def _zeros(self, stack: Sequence[KVPart]) -> torch.Tensor:
        part = stack[0]
        heads = self.num_heads if part.cut_by_heads else part.heads
        blocks = self.num_blocks, heads, self.layout.block_size, part.width
        num_layers = max(len(group.layers) for group in self.layout.groups)
        shape = (num_layers, len(stack), *blocks)
        dtype = DTYPES[part.dtype]
        if self.device.type == "cpu":
            return roomy_zeros(*shape, dtype=dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _num_bytes(self, cut: Cut) -> int:
        return sum(storage._piece_bytes(of, piece, tensor) for storage, of, piece, tensor in self._owners(cut))

    def _owners(self, cut: Cut) -> Iterator[tuple[KVStorage, Cut, range, torch.Tensor]]:
        """Yields the payload's pieces in order: for each range of heads all tensors here, then those of attached
        storages."""
        beside = self.beside if cut.with_head else None
        per_share = beside.num_heads // self.num_heads if beside is not None else 0
        for piece in cut.pieces:
            for tensor in self.tensors:
                yield self, cut, piece, tensor
            if beside is not None:
                layers = range(beside.layout.num_layers)
                for tensor in beside.tensors:
                    yield beside, replace(cut, layers=layers), _scaled(piece, per_share), tensor

    def _piece_bytes(self, cut: Cut, piece: range, tensor: torch.Tensor) -> int:
        _, parts, _, heads, _, width = tensor.shape
        num_heads = len(piece) * heads // self.num_heads
        return len(cut.layers) * parts * len(cut.units) * num_heads * cut.unit * width * tensor.itemsize

    def _pieces(self, cut: Cut, payload: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yields for each piece and tensor its part of the payload, the cache, and their rows for one another. A row is
        a unit of one head, or a whole block. Cache and part are [L, P, rows, elements]."""
        owners = list(self._owners(cut))
        sizes = [storage._piece_bytes(of, piece, tensor) // payload.itemsize for storage, of, piece, tensor in owners]
        for (storage, of, piece, tensor), flat in zip(owners, torch.split(payload, sizes), strict=True):
            yield storage._piece(of, piece, tensor, flat)

    def _piece(
        self, cut: Cut, piece: range, tensor: torch.Tensor, flat: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        per_block = self.layout.block_size // cut.unit
        layers = tensor[cut.layers.start : cut.layers.stop]
        num_layers, num_parts, _, heads, *_ = layers.shape
        if per_block == 1 and len(piece) == self.num_heads and cut.units == range(len(cut.block_ids)):
            view, rows = layers.view(num_layers, num_parts, self.num_blocks, -1), self._ids(cut.block_ids)
        else:
            view = layers.view(num_layers, num_parts, self.num_blocks * heads * per_block, -1)
            rows = self._rows(cut, piece, heads, per_block)
        return flat.view(tensor.dtype).view(num_layers, num_parts, len(rows), -1), view, rows

    def _rows(self, cut: Cut, piece: range, num_heads: int, per_block: int) -> torch.Tensor:
        last, per_share = len(cut.block_ids) * per_block - 1, num_heads // self.num_heads
        units = torch.arange(cut.units.start, cut.units.stop).clamp_(max=last)
        blocks = torch.tensor(cut.block_ids)[units // per_block]
        heads = torch.arange(piece.start * per_share, piece.stop * per_share)
        rows = (blocks[:, None] * num_heads + heads) * per_block + (units % per_block)[:, None]
        return to_device(rows.flatten().numpy(), self.device)

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(block_ids, dtype=np.int64), self.device)


def _scaled(piece: range, factor: int) -> range:
    return range(piece.start * factor, piece.stop * factor)


def _as_typed(view: torch.Tensor, part: KVPart) -> torch.Tensor:
    return view.view(torch.float8_e4m3fn) if part.dtype == FP8 else view


def _alike(parts: Sequence[KVPart]) -> list[list[KVPart]]:
    """Wide elements first: a payload has one after the other, and each begins at a multiple of its own element."""
    same_parts: dict[KVPart, list[KVPart]] = {}
    for part in parts:
        same_parts.setdefault(replace(part, name=""), []).append(part)
    return sorted(same_parts.values(), key=lambda alike: -DTYPES[alike[0].dtype].itemsize)
