"""A decoder's layers in one call of compiled code (layers.cpp), where all of their weights are packed for it.

Ten calls a layer, with what Python and torch do around them, took 0.17 ms; a step of a model of 24 layers 4 ms. The
functions are the same, and so is every bit. Legend: T tokens, E hidden size, D head dim, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch

from workers.kernels.cpu.latent_layers import LatentWeights, packed_latents
from workers.kernels.cpu.native_build import Native, Tiles, address_of, pointers
from workers.kernels.cpu.norms import CompiledActivation, CompiledNorm
from workers.kernels.cpu.pages import LayerCache, PagedCache
from workers.kernels.cpu.products import PackedProduct, Parts, ProductParts, parts_of
from workers.kernels.cpu.regions import apart, empty_rows

AllReduce = Callable[[torch.Tensor], object]

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_Sum = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)

NormTensors = tuple[torch.Tensor, torch.Tensor | None]
"""Weight and bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer's weights, with the norms before and after each half, and of queries and keys, if any. `window`
    includes the token itself."""

    attention_norm: NormTensors | None
    qkv: PackedProduct  # of latent attention what queries are made of, and latents
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    sinks_N: torch.Tensor | None  # float32: one more logit of each query head's softmax
    out: PackedProduct
    attention_after: NormTensors | None
    mlp_norm: NormTensors | None
    gate_up: PackedProduct
    down: PackedProduct | None  # None: `gate_up` is all of the feed-forward half
    mlp_after: NormTensors | None
    window: int | None
    latents: LatentWeights | None = None  # None: the cache has keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """The settings that all layers of a model share."""

    hidden_size: int
    norm: CompiledNorm
    eps: float
    activation: CompiledActivation
    gated: bool  # whether the MLP is gated; else its activation applies to the second product's whole input
    attention_scale: float
    softcap: float
    residual: float  # times what each half of a layer adds
    parallel: bool  # the MLP reads what the attention reads
    heads_together: bool  # queries and keys are normed over all heads
    ropes: tuple[int, ...]  # of each layer: which of the step's


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTables:
    """The positions of a step's tokens, as `NativeAttention` keeps them; all arrays but the tables are contiguous."""

    slots_T: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables_SB: torch.Tensor


class _NormWeights(ctypes.Structure):
    _fields_ = (("weight", _P), ("bias", _P))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _NormWeights) for name in ("attention_norm", "attention_after", "mlp_norm", "mlp_after")),
        *((name, _P) for name in ("q_norm", "k_norm", "sinks")),
        *((name, ProductParts) for name in ("qkv", "out", "gate_up", "down")),
        ("cache", PagedCache),
        *((name, _N) for name in ("window", "rope", "group")),
        ("latents", _P),
    )  # fmt: skip


class _StepArguments(ctypes.Structure):
    _fields_ = (
        *((name, _N) for name in ("num_tokens", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "block_size")),
        *((name, _N) for name in ("norm", "activation", "gated", "parallel", "heads_together")),
        *((name, _F) for name in ("eps", "scale", "softcap", "residual")),
        *((name, ctypes.POINTER(_P)) for name in ("cos", "sin", "slots", "tables")),
        ("table_strides", ctypes.POINTER(_N)),
        *((name, _P) for name in ("query_starts", "context_lens", "query_factors")),
        ("num_rows", _N),
        *((name, _P) for name in ("delta", "stream", "spare", "normed", "qkv", "q_normed", "k_normed", "turned",
                                  "attended", "wide", "inner", "second", "queries", "of_latents")),
        *((name, _N) for name in ("normed_stride", "heads_stride", "inner_stride", "q_normed_stride")),
        ("attend", _P),
        ("sum_over_ranks", _Sum),
        ("num_threads", _N),
    )  # fmt: skip


class _RankSums:
    """Sums over ranks, which compiled layers call for between products."""

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce
        self._parts: tuple[torch.Tensor, ...] = ()
        self._error: BaseException | None = None
        self.function = _Sum(self._sum)

    def begin(self, delta_TE: torch.Tensor, second_TE: torch.Tensor | None) -> None:
        """Begins a step, which changes both tensors in place."""
        self._parts = (delta_TE,) if second_TE is None else (delta_TE, second_TE)

    def check(self) -> None:
        """Raises the error that ended a step."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _sum(self, is_second: int) -> int:
        try:
            self._all_reduce(self._parts[is_second])
        except BaseException as error:  # compiled code cannot pass it on
            self._error = error
            return 1
        return 0


class CompiledLayers:
    """`caches` has keys and values of each layer, which `attention` has the kernel for. `groups` has the group of
    each layer, whose tables it reads; by default there is one. `all_reduce` sums up what several ranks compute."""

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
        all_reduce: AllReduce | None = None,
    ) -> None:
        self._kernels = kernels
        self._sums = None if all_reduce is None else _RankSums(all_reduce)
        self._form = form
        self._first = weights[0]
        self._dtype = dtype
        _, self._num_kv_heads, block_size, self._head_dim = caches[0].keys.shape
        self._latents = packed_latents([layer.latents for layer in weights])
        if self._latents is None:
            self._num_heads = self._first.qkv.weight.num_outputs // self._head_dim - 2 * self._num_kv_heads
        else:
            self._num_heads = self._latents.num_heads
        self._sizes = _StepArguments(
            hidden_size=form.hidden_size, num_heads=self._num_heads, num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim, block_size=block_size, norm=form.norm, activation=form.activation,
            gated=form.gated, parallel=form.parallel, heads_together=form.heads_together, eps=form.eps,
            scale=form.attention_scale, softcap=form.softcap, residual=form.residual,
            attend=address_of(attention.attend),
            sum_over_ranks=_Sum() if self._sums is None else self._sums.function,
        )  # fmt: skip
        products = [_products(layer) for layer in weights]
        latents = repeat(None) if self._latents is None else self._latents.addresses
        by_layer = products, caches, form.ropes, groups or repeat(0), latents
        self._layers = (_Layer * len(weights))(*map(_layer, weights, *by_layer))
        self._kept = tuple(weights), products, tuple(caches)  # the structures hold only their addresses
        self._widest = max((layer.gate_up.weight.num_outputs for layer in weights if layer.down is not None), default=0)
        self._gates_apart = form.gated and any(down and not gate_up[0].gated for _, _, gate_up, down in products)
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
        query_factors_T: torch.Tensor | None = None,
    ) -> CompiledStep:
        """Prepares a step of contiguous rows of the model's dtype, which it changes in place. `rotations` has one entry
        per rope, `rows` the tables of each group. Queries are multiplied by `query_factors_T`, float32, before the
        rotation."""
        for part in (delta_TE, stream_TE):
            assert part.is_contiguous()
            assert part.dtype == self._dtype
        turns = [tuple(part.contiguous() for part in rotation) for rotation in rotations]
        buffers = self._buffers(len(delta_TE))
        step = _StepArguments.from_buffer_copy(self._sizes)
        step.num_tokens, step.num_rows = len(delta_TE), len(rows[0].context_lens)
        step.normed_stride, step.inner_stride = buffers["normed"].stride(0), buffers["inner"].stride(0)
        step.heads_stride = buffers["attended"].stride(0)
        if "q_normed" in buffers:
            step.q_normed_stride = buffers["q_normed"].stride(0)
        step.num_threads = torch.get_num_threads()
        step.query_factors = None if query_factors_T is None else query_factors_T.data_ptr()
        step.cos, step.sin = (_addresses(part) for part in zip(*turns, strict=True))
        step.slots = _addresses([group.slots_T for group in rows])
        step.tables = _addresses([group.block_tables_SB for group in rows])
        step.table_strides = (_N * len(rows))(*(group.block_tables_SB.stride(0) for group in rows))
        read = {"query_starts": rows[0].query_starts, "context_lens": rows[0].context_lens}
        tensors = {"delta": delta_TE, "stream": stream_TE, **read, **buffers}
        for name, tensor in tensors.items():
            setattr(step, name, tensor.data_ptr())

        if self._sums is not None:
            self._sums.begin(delta_TE, buffers.get("second"))
        kept = (*tensors.values(), query_factors_T, *(part for turn in turns for part in turn), tuple(rows))
        return CompiledStep(self._kernels, self._layers, step, self._sums, kept)

    def _buffers(self, num_tokens: int) -> dict[str, torch.Tensor]:
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
            "inner": read_by(self._widest // 2 if self._form.gated else self._widest, down),
        }
        if (latents := self._latents) is not None:
            buffers["attended"] = read_by(latents.num_values, out)
            buffers |= {name: plain(width) for name, width in latents.plain_widths.items()}
            if latents.query_rank:
                buffers["q_normed"] = read_by(latents.query_rank, latents.query_depth)
        else:
            buffers |= {name: read_by(heads, out) for name in ("turned", "attended")}
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
        self,
        kernels: Native,
        layers: ctypes.Array[_Layer],
        step: _StepArguments,
        sums: _RankSums | None,
        kept: tuple[object, ...],
    ) -> None:
        self._kernels, self._layers, self._step, self._sums = kernels, layers, step, sums
        self._kept = kept  # the structure holds only their addresses

    def run(self, first: int, last: int) -> None:
        """Runs halves [first, last), which follow those of the last call. Raises WorkerLost when a rank is gone."""
        self._kernels.run_layers(self._layers, first, last, ctypes.byref(self._step))
        if self._sums is not None:
            self._sums.check()


def _products(weights: LayerWeights) -> tuple[Parts, Parts, Parts, Parts]:
    """Parts of four products: queries, keys and values; the attention's output; gate and up; down."""
    qkv, out, gate_up, down = map(parts_of, (weights.qkv, weights.out, weights.gate_up, weights.down))
    return qkv, out, gate_up, down


def _addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (_P * len(tensors))(*pointers(*tensors))


def _norm(weights: NormTensors | None) -> _NormWeights:
    return _NormWeights(*pointers(*(weights or (None, None))))


def _layer(
    weights: LayerWeights,
    products: Sequence[Parts],
    cache: LayerCache,
    rope: int,
    group: int,
    latents: int | None,
) -> _Layer:
    q_norm, k_norm, sinks = pointers(*(weights.head_norms or (None, None)), weights.sinks_N)
    qkv, out, gate_up, down = (ProductParts(parts=parts, num_parts=len(parts)) for parts in products)
    return _Layer(
        attention_norm=_norm(weights.attention_norm),
        attention_after=_norm(weights.attention_after),
        mlp_norm=_norm(weights.mlp_norm),
        mlp_after=_norm(weights.mlp_after),
        q_norm=q_norm, k_norm=k_norm, sinks=sinks, qkv=qkv, out=out, gate_up=gate_up, down=down,
        cache=cache.described(), window=weights.window or 0, rope=rope, group=group, latents=latents,
    )  # fmt: skip
