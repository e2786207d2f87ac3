"""The tensors of a GGUF file by the names of Hugging Face's modules, in their order of rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from protos.model_files.fields import Fields
from protos.model_files.gguf.reader import GGUFFile, GGUFTensor
from workers.checkpoint.source import StoredTensor

if TYPE_CHECKING:
    import torch

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_IN_CONFIG = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.int16}


@dataclass(frozen=True, slots=True)
class _TranslatedTensor:
    tensor: GGUFTensor
    permuted_heads: int  # 0: rows are stored in Hugging Face's order


class GGUFSource:
    """Quantised tensors are rows of bytes, [outputs, bytes of a row], of a type such as "Q4_K".

    Files of the architecture llama have the rows of q and k in another order, in which llama.cpp rotates neighbours.
    """

    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf
        metadata = Fields(gguf.metadata, str(gguf.path))
        self._heads: dict[str, int] = {}
        if metadata.text_or("general.architecture", "") == "llama":
            num_heads = metadata.integer("llama.attention.head_count")
            kv_heads = metadata.integer_or("llama.attention.head_count_kv", num_heads)
            self._heads = {"attn_q": num_heads, "attn_k": kv_heads}
        self._entries = dict(self._translated())

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def describe(self, name: str) -> StoredTensor:
        tensor = self._entries[name].tensor
        return StoredTensor(shape=_stored_shape(tensor), dtype=tensor.format.name, num_bytes=tensor.num_bytes)

    def read(self, name: str, dim: int, part: slice) -> torch.Tensor:
        import torch

        entry = self._entries[name]
        kind = entry.tensor.format.name
        mapped = np.frombuffer(self._gguf.bytes_of(entry.tensor), dtype=_FLOATS.get(kind, np.uint8))
        whole = mapped.reshape(_stored_shape(entry.tensor))
        if entry.permuted_heads:
            rows = _rows_in_file(whole.shape[0], entry.permuted_heads)
            read = whole[rows[part]] if dim == 0 else whole[rows][:, part]
        else:
            read = np.array(whole[(*[slice(None)] * dim, part)])
        tensor = torch.from_numpy(read)
        return tensor.view(torch.bfloat16) if kind == "BF16" else tensor

    def _translated(self) -> Iterator[tuple[str, _TranslatedTensor]]:
        for tensor in self._gguf.tensors.values():
            found = _NAME.fullmatch(tensor.name)
            if tensor.name in _IN_CONFIG:
                continue
            layer, own, suffix = found.groups() if found else (None, tensor.name, "")
            known = _NAMES.get(own) if layer is None else _LAYER_NAMES.get(own)
            if known is None:
                yield tensor.name, _TranslatedTensor(tensor, 0)
            else:
                prefix = "" if layer is None else f"model.layers.{layer}."
                yield f"{prefix}{known}.{suffix}", _TranslatedTensor(tensor, self._heads.get(own, 0))


@contextmanager
def open_gguf(gguf: GGUFFile) -> Iterator[GGUFSource]:
    yield GGUFSource(gguf)


def _stored_shape(tensor: GGUFTensor) -> tuple[int, ...]:
    if tensor.format.name in _FLOATS:
        return tensor.shape
    return (*tensor.shape[:-1], tensor.row_bytes)


def _rows_in_file(num_rows: int, num_heads: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Where the file has each of Hugging Face's rows: within a head, the second half stands between the first's."""
    rows = np.arange(num_rows, dtype=np.int64).reshape(num_heads, -1, 2)
    return rows.swapaxes(1, 2).reshape(-1)
