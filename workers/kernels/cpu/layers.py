"""A decoder's layers in one call of compiled code (layers.cpp), where all of their products are on tiles.

Ten calls a layer, with what Python and torch do around them, took 0.17 ms; a step of a model of 24 layers 4 ms. The
functions are the same, and so is every bit. Legend: T tokens, E hidden size, D head dim, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.kernels.cpu.build import Tiles
from workers.kernels.cpu.memory import apart, empty_rows
from workers.kernels.cpu.products import TiledWeight

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledProduct:
    """`bias` as the weight packs it."""

    weight: TiledWeight
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Of one layer; norms of queries and keys, [D], where the model has them. `window` counts the token itself."""

    attention_norm_E: torch.Tensor
    qkv: TiledProduct
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    out: TiledProduct
    mlp_norm_E: torch.Tensor
    gate_up: TiledProduct
    down: TiledProduct
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTables:
    """Where a step's tokens stand: as `NativeAttention` keeps it for its kernels, all contiguous but the tables."""

    slots_T: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables_SB: torch.Tensor


class _Product(ctypes.Structure):
    _fields_ = (("packed", _P), ("bias", _P), ("num_outputs", _N), ("num_inputs", _N))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, _Product) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _P) for name in ("k_cache", "v_cache")),
        ("window", _N),
    )  # fmt: skip


class _StepArguments(ctypes.Structure):
    _fields_ = (
        *((name, _N) for name in ("num_tokens", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "block_size")),
        *((name, _F) for name in ("eps", "scale")),
        *((name, _P) for name in ("cos", "sin", "slots", "query_starts", "context_lens", "tables")),
        *((name, _N) for name in ("table_stride", "num_rows")),
        *((name, _P) for name in ("delta", "stream", "spare", "normed", "qkv", "q_normed", "k_normed", "turned",
                                  "attended", "inner")),
        *((name, _N) for name in ("normed_stride", "heads_stride", "inner_stride", "has_tiled_attention",
                                  "num_threads")),
    )  # fmt: skip


class CompiledLayers:
    """`caches` has keys and values of each layer, [NB, K, BS, D]. `tiled` chooses the attention on tiles, which wants
    head sizes that are multiples of 32."""

    def __init__(
        self,
        tiles: Tiles,
        weights: Sequence[LayerWeights],
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        eps: float,
        tiled: bool,
    ) -> None:
        self._tiles = tiles
        self._kept = tuple(weights), tuple(caches)  # the structures hold only their addresses
        self._first = weights[0]
        _, self._num_kv_heads, block_size, self._head_dim = caches[0][0].shape
        self._num_heads = self._first.qkv.weight.num_outputs // self._head_dim - 2 * self._num_kv_heads
        self._hidden_size = len(self._first.attention_norm_E)
        self._sizes = _StepArguments(
            hidden_size=self._hidden_size, num_heads=self._num_heads, num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim, block_size=block_size, eps=eps, scale=self._head_dim**-0.5,
            has_tiled_attention=tiled,
        )  # fmt: skip
        self._layers = (_Layer * len(weights))(*map(_layer, weights, caches))

    def __len__(self) -> int:
        return len(self._layers)

    def begin(
        self,
        delta_TE: torch.Tensor,
        stream_TE: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        rows: RowTables,
    ) -> CompiledStep:
        """A step of contiguous bfloat16 rows, which it changes in place."""
        for part in (delta_TE, stream_TE):
            assert part.is_contiguous()
            assert part.dtype == torch.bfloat16
        cos_TP, sin_TP = (part.contiguous() for part in rotation)
        buffers = self._buffers(len(delta_TE))
        step = _StepArguments.from_buffer_copy(self._sizes)
        step.num_tokens, step.num_rows = len(delta_TE), len(rows.context_lens)
        step.normed_stride, step.inner_stride = buffers["normed"].stride(0), buffers["inner"].stride(0)
        step.heads_stride, step.table_stride = buffers["turned"].stride(0), rows.block_tables_SB.stride(0)
        step.num_threads = torch.get_num_threads()
        read = {"cos": cos_TP, "sin": sin_TP, "slots": rows.slots_T, "tables": rows.block_tables_SB,
                "query_starts": rows.query_starts, "context_lens": rows.context_lens}  # fmt: skip
        tensors = {"delta": delta_TE, "stream": stream_TE, **read, **buffers}
        for name, tensor in tensors.items():
            setattr(step, name, tensor.data_ptr())

        return CompiledStep(self._tiles, self._layers, step, tuple(tensors.values()))

    def _buffers(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """What a step's layers share. Rows that a product reads stand apart as it likes them, and end in as many zeros
        as it reads beyond them."""
        first, heads = self._first, self._num_heads * self._head_dim

        def plain(width: int) -> torch.Tensor:
            return empty_rows(num_tokens, width, dtype=torch.bfloat16)

        def read_by(product: TiledProduct, width: int) -> torch.Tensor:
            depth = product.weight.depth
            rows = empty_rows(num_tokens, depth, dtype=torch.bfloat16, stride=apart(depth, torch.bfloat16))
            if depth > width:
                rows[:, width:] = 0
            return rows

        buffers = {
            "spare": plain(self._hidden_size),
            "normed": read_by(first.qkv, self._hidden_size),
            "qkv": plain(first.qkv.weight.num_outputs),
            "turned": read_by(first.out, heads),
            "attended": read_by(first.out, heads),
            "inner": read_by(first.down, first.gate_up.weight.num_outputs // 2),
        }
        if first.head_norms is not None:
            buffers |= {"q_normed": plain(heads), "k_normed": plain(self._num_kv_heads * self._head_dim)}
        return buffers


class CompiledStep:
    """One step's way through the layers. A layer has two halves: the first ends when its keys and values are in the
    cache."""

    def __init__(
        self, tiles: Tiles, layers: ctypes.Array[_Layer], step: _StepArguments, kept: tuple[torch.Tensor, ...]
    ) -> None:
        self._tiles, self._layers, self._step = tiles, layers, step
        self._kept = kept  # the structure holds only their addresses

    def run(self, first: int, last: int) -> None:
        """Halves [first, last), which follow those that were run before."""
        self._tiles.run_layers(self._layers, first, last, ctypes.byref(self._step))


def _layer(weights: LayerWeights, cache: tuple[torch.Tensor, torch.Tensor]) -> _Layer:
    q_norm, k_norm = weights.head_norms or (None, None)
    keys, values = cache
    return _Layer(
        attention_norm=weights.attention_norm_E.data_ptr(),
        q_norm=None if q_norm is None else q_norm.data_ptr(),
        k_norm=None if k_norm is None else k_norm.data_ptr(),
        mlp_norm=weights.mlp_norm_E.data_ptr(),
        qkv=_product(weights.qkv),
        out=_product(weights.out),
        gate_up=_product(weights.gate_up),
        down=_product(weights.down),
        k_cache=keys.data_ptr(),
        v_cache=values.data_ptr(),
        window=weights.window or 0,
    )


def _product(product: TiledProduct) -> _Product:
    return _Product(
        packed=product.weight.packed.data_ptr(),
        bias=None if product.bias is None else product.bias.data_ptr(),
        num_outputs=product.weight.num_outputs,
        num_inputs=product.weight.depth,
    )
