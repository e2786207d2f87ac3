"""The tensors behind the block ids: one rank's share of a worker's KV cache. Who owns which block is not known here.

Legend: L layers, NB blocks, K key/value heads of this rank, BS positions of a block, D head dim.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvtransfer.reshard import Cut, heads_of
from protos.values import KVLayout
from workers.config import MAX_STEPS_IN_FLIGHT
from workers.kernels.base import kernels_for
from workers.kernels.cpu.memory import roomy_zeros
from workers.kernels.staging import to_device

_cuda: Any = torch.cuda  # a CPU build of torch has not all of its types

MAX_MARKS = MAX_STEPS_IN_FLIGHT + 2  # steps that reads aside can tell apart: one that is over, and all in flight

DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class KVStorage:
    """Keys and values of one rank, [L, 2, NB, K, BS, D].

    Heads stand before positions: a range of a block's heads, which is what a worker with another degree of tensor
    parallelism needs, is contiguous. Zeroed at the start, so that what was never written is finite.
    """

    def __init__(self, layout: KVLayout, *, num_blocks: int, device: str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_heads = heads_of_rank(layout)
        self._kernels = kernels_for(device)
        shape = (layout.num_layers, 2, num_blocks, self.num_heads, layout.block_size, layout.head_dim)
        dtype = DTYPES[layout.dtype]
        on_host = torch.device(device).type == "cpu"
        self.data = roomy_zeros(*shape, dtype=dtype) if on_host else torch.zeros(shape, dtype=dtype, device=device)
        self._aside = _cuda.Stream(device) if self.data.is_cuda else None
        self._marks: deque[Any] = deque(maxlen=MAX_MARKS)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank."""
        return self.num_bytes // self.num_blocks

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def keys(self, layer: int) -> torch.Tensor:
        """[blocks, heads, block size, head dim], a view."""
        return self.data[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        return self.data[layer, 1]

    def gather(self, block_ids: Sequence[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """A contiguous copy of the blocks: [layers, 2, len(block_ids), heads, block size, head dim], in `out` if that
        is given."""
        return self._kernels.gather(self.data, self._ids(block_ids), out)

    def scatter(self, block_ids: Sequence[int], payload: torch.Tensor) -> None:
        """Writes what `gather` gave (here or on a worker with the same layout) into other blocks."""
        expected = (*self.data.shape[:2], len(block_ids), *self.data.shape[3:])
        assert payload.shape == expected, f"payload {tuple(payload.shape)} does not fit {expected}"
        assert payload.dtype == self.data.dtype, f"payload is {payload.dtype}, the cache {self.data.dtype}"
        self.touch()
        self._kernels.scatter(self.data, self._ids(block_ids), payload.to(self.data.device))

    def read(self, cut: Cut, stage: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The payload of a cut (`kvtransfer.reshard`), flat, in memory that `stage(num_bytes)` gives."""
        payload = stage(self._num_elements(cut) * self.data.element_size()).view(self.data.dtype)
        for part, view, rows in self._pieces(cut, payload):
            self._kernels.gather(view, rows, part)
        return payload

    def write(self, cut: Cut, payload: torch.Tensor) -> None:
        """Puts the payload of a cut into this cache's blocks."""
        assert payload.dtype == self.data.dtype, f"payload is {payload.dtype}, the cache {self.data.dtype}"
        assert payload.numel() == self._num_elements(cut), f"payload of {payload.numel()} does not fit {cut}"
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
        """Something else than a step has written, or queued, blocks: who reads from here on must come after it."""
        self._marks.clear()

    @contextmanager
    def aside(self, num_in_flight: int | None = None) -> Iterator[None]:
        """On CUDA, reads go on a stream of their own beside the computation, after all that is queued there now; or,
        where nothing of it is read, not after the last `num_in_flight` steps. Until `rejoin` the computation does not
        wait for them."""
        if self._aside is None:
            yield
            return
        if num_in_flight is not None and num_in_flight < len(self._marks):
            self._aside.wait_event(self._marks[-1 - num_in_flight])
        else:
            self._aside.wait_stream(_cuda.current_stream())
        with _cuda.stream(self._aside):
            yield

    def rejoin(self) -> None:
        """What is computed from here on may write into blocks that were read aside."""
        if self._aside is not None:
            _cuda.current_stream().wait_stream(self._aside)

    def _num_elements(self, cut: Cut) -> int:
        return len(cut.layers) * 2 * len(cut.units) * cut.num_heads * cut.unit * self.layout.head_dim

    def _pieces(self, cut: Cut, payload: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each piece: its part of the payload, the cache, and the rows of the one in the other; a row is a unit
        of one head, or a whole block where that is what is wanted. Cache and part are [L, 2, rows, elements]."""
        layers = self.data[cut.layers.start : cut.layers.stop]
        per_block = self.layout.block_size // cut.unit
        whole = range(self.num_heads)
        for piece, part in zip(cut.pieces, self._split(cut, payload), strict=True):
            view = layers.view(len(layers), 2, self.num_blocks * self.num_heads * per_block, -1)
            if per_block == 1 and piece == whole and cut.units == range(len(cut.block_ids)):
                view, rows = layers.view(len(layers), 2, self.num_blocks, -1), self._ids(cut.block_ids)
            else:
                rows = self._rows(cut, piece, per_block)
            yield part.view(len(layers), 2, len(rows), -1), view, rows

    def _split(self, cut: Cut, payload: torch.Tensor) -> Sequence[torch.Tensor]:
        per_head = payload.numel() // cut.num_heads
        return torch.split(payload, [per_head * len(piece) for piece in cut.pieces])

    def _rows(self, cut: Cut, piece: range, per_block: int) -> torch.Tensor:
        last = len(cut.block_ids) * per_block - 1
        units = torch.arange(cut.units.start, cut.units.stop).clamp_(max=last)
        blocks = torch.tensor(cut.block_ids)[units // per_block]
        heads = torch.arange(piece.start, piece.stop)
        rows = (blocks[:, None] * self.num_heads + heads) * per_block + (units % per_block)[:, None]
        return to_device(rows.flatten().numpy(), self.data.device)

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(block_ids, dtype=np.int64), self.data.device)


def heads_of_rank(layout: KVLayout) -> int:
    """KV heads that each rank holds: its share, or one (a copy) when there are more ranks than heads."""
    return len(heads_of(layout, 0))
