"""A decoder's layers in one call of compiled code (layers.cpp), where all of their weights are packed for it.

Ten calls a layer, with what Python and torch do around them, took 0.17 ms; a step of a model of 24 layers 4 ms. The
functions are the same, and so is every bit. Legend: T tokens, E hidden size, D head dim, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import torch

from workers.kernels.cpu.build import Native, Tiles, address_of
from workers.kernels.cpu.memory import apart, empty_rows
from workers.kernels.cpu.norms import CompiledNorm
from workers.kernels.cpu.pages import LayerCache, PagedCache
from workers.kernels.cpu.products import PackedProduct, ProductPart, ProductParts

if TYPE_CHECKING:
    from workers.attention.base import AttentionInputs

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Of one layer; norms of each half before and after it, and of queries and keys, where the model has them. `window`
    counts the token itself."""

    attention_norm_E: torch.Tensor | None
    qkv: PackedProduct
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    out: PackedProduct
    attention_after_E: torch.Tensor | None
    mlp_norm_E: torch.Tensor | None
    gate_up: PackedProduct
    down: PackedProduct | None  # None: `gate_up` is all of the feed-forward half
    mlp_after_E: torch.Tensor | None
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """What all layers of a model do alike, beside their weights."""

    hidden_size: int
    norm: CompiledNorm
    eps: float
    gelu: bool  # by tanh; else SiLU
    attention_scale: float
    softcap: float
    residual: float  # times what each half of a layer adds
    parallel: bool  # the MLP reads what the attention reads
    heads_together: bool  # queries and keys are normed over all heads
    ropes: tuple[int, ...]  # of each layer: which of the step's


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTables:
    """Where a step's tokens stand: as `NativeAttention` keeps it for its kernels, all contiguous but the tables."""

    slots_T: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables_SB: torch.Tensor

    @classmethod
    def of(cls, inputs: AttentionInputs, group: int) -> RowTables:
        tables = inputs.tables[group]
        return cls(
            slots_T=tables.slots_T.contiguous(),
            query_starts=torch.tensor(inputs.query_starts),
            context_lens=torch.tensor(inputs.context_lens),
            block_tables_SB=tables.block_tables_SB.contiguous(),
        )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("attention_norm", "attention_after", "q_norm", "k_norm", "mlp_norm", "mlp_after")),
        *((name, ProductParts) for name in ("qkv", "out", "gate_up", "down")),
        ("cache", PagedCache),
        *((name, _N) for name in ("window", "rope", "group")),
    )  # fmt: skip


class _StepArguments(ctypes.Structure):
    _fields_ = (
        *((name, _N) for name in ("num_tokens", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "block_size")),
        *((name, _N) for name in ("norm", "gelu", "parallel", "heads_together")),
        *((name, _F) for name in ("eps", "scale", "softcap", "residual")),
        *((name, ctypes.POINTER(_P)) for name in ("cos", "sin", "slots", "tables")),
        ("table_strides", ctypes.POINTER(_N)),
        *((name, _P) for name in ("query_starts", "context_lens")),
        ("num_rows", _N),
        *((name, _P) for name in ("delta", "stream", "spare", "normed", "qkv", "q_normed", "k_normed", "turned",
                                  "attended", "wide", "inner", "second")),
        *((name, _N) for name in ("normed_stride", "heads_stride", "inner_stride")),
        ("attend", _P),
        ("num_threads", _N),
    )  # fmt: skip


class CompiledLayers:
    """`caches` has keys and values of each layer, which `attention` has the kernel for. `groups` has the group of
    each layer, whose tables it reads; by default there is one."""

    def __init__(
        self,
        kernels: Native,
        weights: Sequence[LayerWeights],
        caches: Sequence[LayerCache],
        *,
        form: LayerForm,
        dtype: torch.dtype,
        attention: Native | Tiles,
        groups: Sequence[int] | None = None,
    ) -> None:
        self._kernels = kernels
        self._form = form
        self._first = weights[0]
        self._dtype = dtype
        _, self._num_kv_heads, block_size, self._head_dim = caches[0].keys.shape
        self._num_heads = self._first.qkv.weight.num_outputs // self._head_dim - 2 * self._num_kv_heads
        self._sizes = _StepArguments(
            hidden_size=form.hidden_size, num_heads=self._num_heads, num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim, block_size=block_size, norm=form.norm, gelu=form.gelu, parallel=form.parallel,
            heads_together=form.heads_together, eps=form.eps, scale=form.attention_scale, softcap=form.softcap,
            residual=form.residual, attend=address_of(attention.attend),
        )  # fmt: skip
        products = [_products(layer) for layer in weights]
        by_layer = products, caches, form.ropes, groups or repeat(0)
        self._layers = (_Layer * len(weights))(*map(_layer, weights, *by_layer))
        self._kept = tuple(weights), products, tuple(caches)  # the structures hold only their addresses
        self._widest = max((layer.gate_up.weight.num_outputs for layer in weights if layer.down is not None), default=0)
        self._gates_apart = any(down and not gate_up[0].gated for _, _, gate_up, down in products)
        self._depths = [
            max((part.num_inputs for parts in column for part in parts), default=0)
            for column in zip(*products, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._layers)

    def begin(
        self,
        delta_TE: torch.Tensor,
        stream_TE: torch.Tensor,
        rotations: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rows: Sequence[RowTables],
    ) -> CompiledStep:
        """A step of contiguous rows of the model's dtype, which it changes in place. `rotations` has each rope's,
        `rows` the tables of each group."""
        for part in (delta_TE, stream_TE):
            assert part.is_contiguous()
            assert part.dtype == self._dtype
        turns = [tuple(part.contiguous() for part in rotation) for rotation in rotations]
        buffers = self._buffers(len(delta_TE))
        step = _StepArguments.from_buffer_copy(self._sizes)
        step.num_tokens, step.num_rows = len(delta_TE), len(rows[0].context_lens)
        step.normed_stride, step.inner_stride = buffers["normed"].stride(0), buffers["inner"].stride(0)
        step.heads_stride = buffers["turned"].stride(0)
        step.num_threads = torch.get_num_threads()
        step.cos, step.sin = (_addresses(part) for part in zip(*turns, strict=True))
        step.slots = _addresses([group.slots_T for group in rows])
        step.tables = _addresses([group.block_tables_SB for group in rows])
        step.table_strides = (_N * len(rows))(*(group.block_tables_SB.stride(0) for group in rows))
        read = {"query_starts": rows[0].query_starts, "context_lens": rows[0].context_lens}
        tensors = {"delta": delta_TE, "stream": stream_TE, **read, **buffers}
        for name, tensor in tensors.items():
            setattr(step, name, tensor.data_ptr())

        kept = (*tensors.values(), *(part for turn in turns for part in turn), tuple(rows))
        return CompiledStep(self._kernels, self._layers, step, kept)

    def _buffers(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """What a step's layers share. Rows that a product reads stand apart as it likes them, and end in as many zeros
        as it reads beyond them."""
        first, heads = self._first, self._num_heads * self._head_dim

        def plain(width: int) -> torch.Tensor:
            return empty_rows(num_tokens, width, dtype=self._dtype)

        def read_by(width: int, *depths: int) -> torch.Tensor:
            depth = max(width, *depths)
            rows = empty_rows(num_tokens, depth, dtype=self._dtype, stride=apart(depth, self._dtype))
            if depth > width:
                rows[:, width:] = 0
            return rows

        qkv, out, gate_up, down = self._depths
        buffers = {
            "spare": plain(self._form.hidden_size),
            "normed": read_by(self._form.hidden_size, qkv, gate_up),
            "qkv": plain(first.qkv.weight.num_outputs),
            "turned": read_by(heads, out),
            "attended": read_by(heads, out),
            "inner": read_by(self._widest // 2, down),
        }
        if first.head_norms is not None:
            buffers |= {"q_normed": plain(heads), "k_normed": plain(self._num_kv_heads * self._head_dim)}
        if self._form.parallel:
            buffers["second"] = plain(self._form.hidden_size)
        if self._gates_apart:
            buffers["wide"] = plain(self._widest)
        return buffers


class CompiledStep:
    """One step's way through the layers. A layer has two halves: the first ends when its keys and values are in the
    cache."""

    def __init__(
        self, kernels: Native, layers: ctypes.Array[_Layer], step: _StepArguments, kept: tuple[object, ...]
    ) -> None:
        self._kernels, self._layers, self._step = kernels, layers, step
        self._kept = kept  # the structure holds only their addresses

    def run(self, first: int, last: int) -> None:
        """Halves [first, last), which follow those that were run before."""
        self._kernels.run_layers(self._layers, first, last, ctypes.byref(self._step))


_Parts = ctypes.Array[ProductPart]


def _products(weights: LayerWeights) -> tuple[_Parts, _Parts, _Parts, _Parts]:
    """Of queries, keys and values, of the attention's output, of gate and up, and of down."""
    qkv, out, gate_up, down = map(_parts, (weights.qkv, weights.out, weights.gate_up, weights.down))
    return qkv, out, gate_up, down


def _parts(product: PackedProduct | None) -> _Parts:
    parts = product.weight.parts(product.bias_O) if product is not None else []
    return (ProductPart * len(parts))(*parts)


def _addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (_P * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _layer(weights: LayerWeights, products: Sequence[_Parts], cache: LayerCache, rope: int, group: int) -> _Layer:
    q_norm, k_norm = weights.head_norms or (None, None)
    qkv, out, gate_up, down = (ProductParts(parts=parts, num_parts=len(parts)) for parts in products)
    return _Layer(
        attention_norm=_address(weights.attention_norm_E),
        attention_after=_address(weights.attention_after_E),
        q_norm=_address(q_norm),
        k_norm=_address(k_norm),
        mlp_norm=_address(weights.mlp_norm_E),
        mlp_after=_address(weights.mlp_after_E),
        qkv=qkv,
        out=out,
        gate_up=gate_up,
        down=down,
        cache=cache.described(),
        window=weights.window or 0,
        rope=rope,
        group=group,
    )
