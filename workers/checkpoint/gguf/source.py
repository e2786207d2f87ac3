"""The tensors of a GGUF file by the names of Hugging Face's modules, in their order of rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from protos.model_files.fields import Fields
from protos.model_files.gguf.config import PERMUTED
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
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {"ffn_gate": ("gate_proj", "w1"), "ffn_up": ("up_proj", "w3"), "ffn_down": ("down_proj", "w2")}
"""By Qwen's names and Mixtral's. `_exps` has the experts of a layer in one tensor; old files have one for each."""
_QWEN_LAYER_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL_LAYER_NAMES = {"ffn_gate_inp": "block_sparse_moe.gate"}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)(?:\.(\d+))?\.(weight|bias)")
_IN_CONFIG = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.int16}


@dataclass(frozen=True, slots=True)
class _TranslatedTensor:
    tensor: GGUFTensor
    permuted_heads: int  # 0: rows are stored in Hugging Face's order
    expert: int | None = None  # the part of a tensor with all experts

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored: a quantised row as its bytes. A vector that gates the shared expert is a matrix of one row."""
        shape = self.tensor.shape[1:] if self.expert is not None else self.tensor.shape
        if self.tensor.format.name not in _FLOATS:
            shape = (*shape[:-1], self.tensor.row_bytes)
        return (1, *shape) if self.tensor.name.endswith("ffn_gate_inp_shexp.weight") and len(shape) == 1 else shape

    @property
    def num_bytes(self) -> int:
        return self.tensor.num_bytes // (self.tensor.shape[0] if self.expert is not None else 1)


class GGUFSource:
    """Quantised tensors are rows of bytes, [outputs, bytes of a row], of a type such as "Q4_K".

    Some architectures' files (`PERMUTED`) have the rows of q and k in another order.
    """

    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf
        metadata = Fields(gguf.metadata, str(gguf.path))
        self._heads: dict[str, int] = {}
        name = metadata.text_or("general.architecture", "")
        self._mixtral = name == "llama"
        if name in PERMUTED:
            num_heads = metadata.integer(f"{name}.attention.head_count")
            kv_heads = metadata.integer_or(f"{name}.attention.head_count_kv", num_heads)
            self._heads = {"attn_q": num_heads, "attn_k": kv_heads}
        self._entries = dict(self._translated())

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def describe(self, name: str) -> StoredTensor:
        entry = self._entries[name]
        return StoredTensor(shape=entry.shape, dtype=entry.tensor.format.name, num_bytes=entry.num_bytes)

    def read(self, name: str, dim: int, part: slice) -> torch.Tensor:
        import torch

        entry = self._entries[name]
        kind = entry.tensor.format.name
        mapped = np.frombuffer(self._gguf.bytes_of(entry.tensor), dtype=_FLOATS.get(kind, np.uint8))
        if entry.expert is not None:
            mapped = mapped.reshape(entry.tensor.shape[0], -1)[entry.expert]
        whole = mapped.reshape(entry.shape)
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
            layer, own, number, suffix = found.groups() if found else (None, tensor.name, None, "")
            if layer is not None and (expert := own.removesuffix("_exps")) in _EXPERTS and (number or expert != own):
                yield from self._experts(tensor, layer, expert, number)
                continue
            known = _NAMES.get(own) if layer is None else (_LAYER_NAMES | self._mixture_names).get(own)
            if known is None or number is not None:
                yield tensor.name, _TranslatedTensor(tensor, 0)
            else:
                prefix = "" if layer is None else f"model.layers.{layer}."
                yield f"{prefix}{known}.{suffix}", _TranslatedTensor(tensor, self._heads.get(own, 0))

    @property
    def _mixture_names(self) -> dict[str, str]:
        return _MIXTRAL_LAYER_NAMES if self._mixtral else _QWEN_LAYER_NAMES

    def _experts(
        self, tensor: GGUFTensor, layer: str, own: str, number: str | None
    ) -> Iterator[tuple[str, _TranslatedTensor]]:
        """Those of a tensor with all experts of a layer, or the one with this number."""
        module = "block_sparse_moe" if self._mixtral else "mlp"
        name = _EXPERTS[own][self._mixtral]
        prefix = f"model.layers.{layer}.{module}.experts"
        if number is not None:
            yield f"{prefix}.{number}.{name}.weight", _TranslatedTensor(tensor, 0)
        elif len(tensor.shape) == 3:
            for expert in range(tensor.shape[0]):
                yield f"{prefix}.{expert}.{name}.weight", _TranslatedTensor(tensor, 0, expert)


@contextmanager
def open_gguf(gguf: GGUFFile) -> Iterator[GGUFSource]:
    yield GGUFSource(gguf)


def _rows_in_file(num_rows: int, num_heads: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Where the file has each of Hugging Face's rows: within a head, the second half stands between the first's."""
    rows = np.arange(num_rows, dtype=np.int64).reshape(num_heads, -1, 2)
    return rows.swapaxes(1, 2).reshape(-1)
