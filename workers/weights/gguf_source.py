"""The tensors of a GGUF file by the names of Hugging Face's modules, in their order of rows.

What llama.cpp's converter does to weights is undone as they are read: rows of queries and keys in another order
(`Architecture.permuted`), all experts of a layer in one tensor, 1 added to norms' weights (Gemma), and kv_b_proj as
attn_k_b, transposed, and attn_v_b (DeepSeek), which are put together in floating point.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from protos.errors import BadCheckpoint
from protos.model_files.fields import Fields
from protos.model_files.gguf.architectures import ARCHITECTURES
from protos.model_files.gguf.gguf_file import GGUFFile, GGUFTensor
from workers.weights.gguf_names import ExpertTensor, expert_tensor, names_of, translated
from workers.weights.source import StoredTensor

if TYPE_CHECKING:
    import torch

_IN_CONFIG = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.int16}


@dataclass(frozen=True, slots=True)
class _TranslatedTensor:
    tensor: GGUFTensor
    permuted_heads: int = 0  # 0: rows are stored in Hugging Face's order
    expert: int | None = None  # the part of a tensor with all experts
    rows: range | None = None  # of that part; None: all rows
    added: float = 0.0  # to every number, by the converter

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Before rows are cut, as stored: a quantised row as its bytes."""
        shape = self.tensor.shape[1:] if self.expert is not None else self.tensor.shape
        return shape if self.tensor.format.name in _FLOATS else (*shape[:-1], self.tensor.row_bytes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Adds a dimension: the vector that gates the shared expert is a matrix of one row."""
        shape = self.whole_shape if self.rows is None else (len(self.rows), *self.whole_shape[1:])
        return (1, *shape) if self.tensor.name.endswith("ffn_gate_inp_shexp.weight") and len(shape) == 1 else shape

    @property
    def num_bytes(self) -> int:
        whole = self.tensor.num_bytes // (self.tensor.shape[0] if self.expert is not None else 1)
        return whole if self.rows is None else whole * len(self.rows) // self.whole_shape[0]


@dataclass(frozen=True, slots=True)
class _LatentHalves:
    """kv_b_proj: for each head the rows that make keys, then those that make values."""

    keys: GGUFTensor  # [heads, inputs, rows]
    values: GGUFTensor  # [heads, rows, inputs]

    @property
    def shape(self) -> tuple[int, int]:
        heads, inputs, key_rows = self.keys.shape
        return heads * (key_rows + self.values.shape[1]), inputs


class GGUFSource:
    """Quantised tensors are rows of bytes, [outputs, bytes of a row], of a type such as "Q4_K"."""

    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf
        metadata = Fields(gguf.metadata, str(gguf.path))
        self._heads: dict[str, int] = {}
        name = metadata.text_or("general.architecture", "")
        self._names = names_of(name)
        if name in ARCHITECTURES and ARCHITECTURES[name].permuted:
            num_heads = metadata.integer(f"{name}.attention.head_count")
            kv_heads = metadata.integer_or(f"{name}.attention.head_count_kv", num_heads)
            self._heads = {"attn_q": num_heads, "attn_k": kv_heads}
        self._latents: dict[str, _LatentHalves] = {}
        self._entries = dict(self._translated())

    def names(self) -> Collection[str]:
        return self._entries.keys() | self._latents.keys()

    def describe(self, name: str) -> StoredTensor:
        if (halves := self._latents.get(name)) is not None:
            return StoredTensor(
                shape=halves.shape, dtype="F32", num_bytes=halves.keys.num_bytes + halves.values.num_bytes
            )
        entry = self._entries[name]
        return StoredTensor(shape=entry.shape, dtype=entry.tensor.format.name, num_bytes=entry.num_bytes)

    def read(self, name: str, dim: int, part: slice) -> torch.Tensor:
        import torch

        if (halves := self._latents.get(name)) is not None:
            return self._joined(halves)[(*[slice(None)] * dim, part)]
        entry = self._entries[name]
        kind = entry.tensor.format.name
        mapped = np.frombuffer(self._gguf.bytes_of(entry.tensor), dtype=_FLOATS.get(kind, np.uint8))
        if entry.expert is not None:
            mapped = mapped.reshape(entry.tensor.shape[0], -1)[entry.expert]
        whole = mapped.reshape(entry.whole_shape)
        if entry.rows is not None:
            whole = whole[entry.rows.start : entry.rows.stop]
        whole = whole.reshape(entry.shape)
        if entry.permuted_heads:
            rows = _rows_in_file(whole.shape[0], entry.permuted_heads)
            read = whole[rows[part]] if dim == 0 else whole[rows][:, part]
        else:
            read = np.array(whole[(*[slice(None)] * dim, part)])
        tensor = torch.from_numpy(read)
        tensor = tensor.view(torch.bfloat16) if kind == "BF16" else tensor
        return tensor if entry.added == 0.0 else tensor.float() - entry.added

    def _joined(self, halves: _LatentHalves) -> torch.Tensor:
        import torch

        keys_NIO, values_NOI = self._dequantised(halves.keys), self._dequantised(halves.values)
        return torch.cat((keys_NIO.transpose(1, 2), values_NOI), dim=1).flatten(0, 1)

    def _dequantised(self, tensor: GGUFTensor) -> torch.Tensor:
        import torch

        from workers.weights.formats.gguf_blocks import weight_of_blocks

        kind = tensor.format.name
        stored = np.frombuffer(self._gguf.bytes_of(tensor), dtype=_FLOATS.get(kind, np.uint8)).copy()
        if kind in _FLOATS:
            floats = torch.from_numpy(stored)
            return (floats.view(torch.bfloat16) if kind == "BF16" else floats).float().view(tensor.shape)
        rows = torch.from_numpy(stored.reshape(-1, tensor.row_bytes))
        return weight_of_blocks(kind, rows).dequantised().view(tensor.shape)

    def _translated(self) -> Iterator[tuple[str, _TranslatedTensor]]:
        halves: dict[str, GGUFTensor] = {}
        for tensor in self._gguf.tensors.values():
            if tensor.name in _IN_CONFIG:
                continue
            if (experts := expert_tensor(tensor.name, self._names)) is not None:
                yield from _of_experts(tensor, experts)
                continue
            name = translated(tensor.name, self._names)
            if name.endswith((".attn_k_b.weight", ".attn_v_b.weight")):
                halves[name] = tensor
                continue
            heads = next((count for own, count in self._heads.items() if f".{own}." in tensor.name), 0)
            added = self._names.norm_offset if name.endswith("norm.weight") else 0.0
            yield name, _TranslatedTensor(tensor, heads, added=added)
        for name, keys in halves.items():
            values = halves.get(name.replace(".attn_k_b.", ".attn_v_b."))
            if ".attn_k_b." in name and values is not None:
                self._latents[name.replace("attn_k_b", "self_attn.kv_b_proj")] = _halves(self._gguf, keys, values)


def _of_experts(tensor: GGUFTensor, experts: ExpertTensor) -> Iterator[tuple[str, _TranslatedTensor]]:
    if experts.expert is not None:
        [projection] = experts.projections
        yield f"{experts.prefix}.{experts.expert}.{projection}.{experts.suffix}", _TranslatedTensor(tensor)
        return
    if len(tensor.shape) < 2:
        return
    size = tensor.shape[1] // len(experts.projections)
    for expert in range(tensor.shape[0]):
        for place, projection in enumerate(experts.projections):
            rows = range(place * size, (place + 1) * size) if len(experts.projections) > 1 else None
            name = f"{experts.prefix}.{expert}.{projection}.{experts.suffix}"
            yield name, _TranslatedTensor(tensor, expert=expert, rows=rows)


def _halves(gguf: GGUFFile, keys: GGUFTensor, values: GGUFTensor) -> _LatentHalves:
    """Raises BadCheckpoint unless the tensors are the halves of one matrix."""
    fits = len(keys.shape) == len(values.shape) == 3
    if not fits or (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2]):
        raise BadCheckpoint(
            f"{gguf.path}: {keys.name!r} is {keys.shape}, {values.name!r} is {values.shape}: they are no halves "
            "of one matrix"
        )
    return _LatentHalves(keys, values)


@contextmanager
def open_gguf(gguf: GGUFFile) -> Iterator[GGUFSource]:
    yield GGUFSource(gguf)


def _rows_in_file(num_rows: int, num_heads: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Where the file has each of Hugging Face's rows: within a head the halves alternate."""
    rows = np.arange(num_rows, dtype=np.int64).reshape(num_heads, -1, 2)
    return rows.swapaxes(1, 2).reshape(-1)
