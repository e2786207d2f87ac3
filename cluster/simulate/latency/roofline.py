"""Step times of GPUs: a roofline of each kind of kernel, added up over the layers. Host work is hidden (ADR 10)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from cluster.simulate.latency.kernels import FITTED, KernelTimes, elementwise_s
from cluster.simulate.latency.shapes import BFLOAT16, COMPUTED_IN, GPUS, WEIGHT_BYTES, Gpu, ModelShape
from cluster.simulate.latency.step_work import StepWork
from protos.errors import Misconfigured

ACTIVATION_BYTES = 2.0
HOST_S = 0.002
"""An estimate of a step's host work that no step in flight hides (`worker.steps_in_flight = 0`)."""


def check_fitted(gpu_name: str, gpu: Gpu, model_name: str, model: ModelShape) -> None:
    """Raises Misconfigured for a type of weights whose products the GPU lacks, or that were not measured."""
    subject = f"hardware.gpu = {gpu_name!r} with model = {model_name!r}, whose weights are {model.dtype}"
    if model.computed_in != BFLOAT16 and gpu.fp8_flops is None:
        able = ", ".join(name for name, other in GPUS.items() if other.fp8_flops is not None)
        raise Misconfigured(f"{subject}: its tensor cores have no FP8: give one of {able}", param="hardware.gpu")
    kernels = FITTED[gpu.like]
    if model.computed_in not in kernels.products or (
        model.experts is not None and model.experts_computed_in not in kernels.experts
    ):
        raise Misconfigured(f"{subject}: no such kernels were measured: choose another of both", param="hardware.gpu")


def busiest_share(mean: float, num_gpus: int) -> float:
    """The most that one of `num_gpus` gets over the mean: the expected maximum of as many normal variables (Cramer,
    Mathematical Methods of Statistics, 28.6) with a Poisson distribution's variance."""
    return 1 + math.sqrt(2 * math.log(num_gpus) / mean) if mean else 1.0


class Product(NamedTuple):
    """Activations with `depth` numbers per token times weights of `depth` x `width`, `repeats` times per step."""

    width: float
    depth: float
    repeats: int


class StepParts(NamedTuple):
    """Seconds."""

    products: float = 0.0
    experts: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    reduce: float = 0.0

    def total(self) -> float:
        return self.products + self.experts + self.attention + self.elementwise + self.reduce


class Roofline:
    """Step times of one worker's `tp` GPUs, which share heads, experts and MLPs. `slowness` multiplies arithmetic."""

    def __init__(
        self, *, gpu: Gpu, model: ModelShape, tp: int = 1, host_s: float = 0.0, slowness: float = 1.0,
        kernels: KernelTimes | None = None,
    ) -> None:  # fmt: skip
        self.gpu = gpu
        self.model = model
        self.tp = tp
        self._kernels = kernels or FITTED[gpu.like]
        self._host_s = host_s
        self._rate = gpu.flops / slowness
        self._weights_rate = (gpu.flops if model.computed_in == BFLOAT16 else gpu.fp8_flops or gpu.flops) / slowness
        self._by_tokens: dict[tuple[float, float], float] = {}
        self._decode_s = self._make_decode_s()
        self._prefill_s = self._make_prefill_s()

    def step_s(self, step: StepWork) -> float:
        sizes = (step.num_tokens, step.num_rows)
        taken_s = self._by_tokens.get(sizes)
        if taken_s is None:
            taken_s = self._by_tokens[sizes] = self._host_s + self._without_attention(*sizes).total()
        return taken_s + self.attention_s(step)

    def parts(self, step: StepWork) -> StepParts:
        return self._without_attention(step.num_tokens, step.num_rows)._replace(attention=self.attention_s(step))

    def attention_s(self, step: StepWork) -> float:
        taken_s = 0.0
        if single := step.num_single:
            fixed_s, row_s, read_s = self._decode_s
            taken_s = fixed_s + single * row_s + step.num_single_read * read_s
        if step.num_rows > single:
            fixed_s, token_s, attended_s, read_s = self._prefill_s
            read = step.num_read - step.num_single_read
            attended = step.num_attended - step.num_single_read
            taken_s += fixed_s + (step.num_tokens - single) * token_s + max(attended * attended_s, read * read_s)
        return taken_s

    def _make_decode_s(self) -> tuple[float, float, float]:
        """Times in all layers: constant, per sequence, per KV position read. Heads that share a key read it once; 128
        heads that share a latent may be bound by arithmetic."""
        model, gpu, layers, latent = self.model, self.gpu, self.model.layers, self.model.latent
        heads, kv_bytes = model.heads / self.tp, model.kept_bytes(self.tp) / self.tp / layers
        fitted = self._kernels.attention if latent is None else self._kernels.latent
        read_s = kv_bytes / (gpu.memory_rate * fitted.memory_share)
        if latent is not None:
            flops = 2 * heads * (2 * latent.rank + latent.rope_dim)
            read_s = max(read_s, flops / (self._rate * fitted.compute_share))
        return fitted.decode_fixed_s * layers, fitted.row_s * heads * layers, read_s * layers

    def _make_prefill_s(self) -> tuple[float, float, float, float]:
        """Times in all layers: constant, per token, per pair of a token and a position that it attends to, per KV
        position read."""
        model, layers, latent = self.model, self.model.layers, self.model.latent
        heads = model.heads / self.tp
        fitted = self._kernels.attention if latent is None else self._kernels.latent
        dims = 2 * model.head_dim if latent is None else latent.nope_dim + latent.rope_dim + latent.value_dim
        attended_s = 2 * heads * dims / (self._rate * fitted.compute_share)
        kv_bytes = model.kept_bytes(self.tp) / self.tp / layers
        read_s = kv_bytes / (self.gpu.memory_rate * fitted.memory_share)
        token_s = fitted.element_s * heads * model.head_dim
        return fitted.prefill_fixed_s * layers, token_s * layers, attended_s * layers, read_s * layers

    def projections(self) -> list[Product]:
        return self._latent_projections() if self.model.latent is not None else self._grouped_projections()

    def mlps(self) -> list[Product]:
        """The MLPs' products in all layers, shared experts included."""
        model, experts = self.model, self.model.experts
        num_routed = self._num_routed_layers()
        widths = [(model.width, model.layers - num_routed)]
        if experts is not None and experts.num_shared:
            widths.append((round(experts.width * experts.num_shared), num_routed))
        products = []
        for width, count in widths:
            share = width / self.tp
            products += [Product(2 * share, model.hidden, count), Product(model.hidden, share, count)]
        return products

    def products_s(self, products: Iterable[Product], num_tokens: float, dtype: str) -> float:
        weight_bytes, computed_in = WEIGHT_BYTES[dtype], COMPUTED_IN[dtype]
        rate = self._rate if computed_in == BFLOAT16 else self._weights_rate
        fitted, memory_rate = self._kernels.products[computed_in], self.gpu.memory_rate
        taken_s = 0.0
        for width, depth, repeats in products:
            num_bytes = width * depth * weight_bytes
            num_bytes += num_tokens * (depth * WEIGHT_BYTES[computed_in] + width * ACTIVATION_BYTES)
            taken_s += repeats * fitted.seconds(2 * width * depth * num_tokens, num_bytes, rate, memory_rate)
        return taken_s

    def _without_attention(self, num_tokens: float, num_rows: float) -> StepParts:
        """The products of `num_tokens` tokens, of which `num_rows` are sampled."""
        model, gpu, tp = self.model, self.gpu, self.tp
        products_s = self.products_s([*self.projections(), *self.mlps()], num_tokens, model.dtype)
        products_s += self.products_s([Product(model.vocab / tp, model.hidden, 1)], num_rows, BFLOAT16)
        if model.experts is not None:
            router = Product(model.experts.num, model.hidden, self._num_routed_layers())
            products_s += self.products_s([router], num_tokens, BFLOAT16)
        num_bytes = num_tokens * model.hidden * ACTIVATION_BYTES
        return StepParts(
            products=products_s,
            experts=self.experts_s(num_tokens),
            elementwise=elementwise_s(gpu, self._elementwise_bytes(num_tokens), 3 * model.layers),
            reduce=(2 * model.layers + 1) * self._kernels.reduce.seconds(gpu, tp, num_bytes),
        )

    def _grouped_projections(self) -> list[Product]:
        model, tp = self.model, self.tp
        heads, kv_heads = model.heads / tp, max(1.0, model.kv_heads / tp)
        return [
            Product((heads + 2 * kv_heads) * model.head_dim, model.hidden, model.layers),
            Product(model.hidden, heads * model.head_dim, model.layers),
        ]

    def _latent_projections(self) -> list[Product]:
        """Queries and keys are compressed on every rank. The expansion of keys and values is absorbed into queries and
        output while decoding, at the same size."""
        model, latent = self.model, self.model.latent
        assert latent is not None
        heads, layers = model.heads / self.tp, model.layers
        per_head = latent.nope_dim + latent.rope_dim
        down = (latent.query_rank or heads * per_head) + latent.rank + latent.rope_dim
        products = [Product(down, model.hidden, layers)]
        if latent.query_rank:
            products.append(Product(heads * per_head, latent.query_rank, layers))
        products.append(Product(heads * (latent.nope_dim + latent.value_dim), latent.rank, layers))
        return [*products, Product(model.hidden, heads * latent.value_dim, layers)]

    def _num_routed_layers(self) -> int:
        experts = self.model.experts
        return 0 if experts is None else self.model.layers - experts.num_dense_layers

    def experts_s(self, num_tokens: float) -> float:
        """Seconds of the routed experts. With whole experts on GPUs the busiest GPU decides."""
        model = self.model
        if (experts := model.experts) is None:
            return 0.0
        params, busiest = 3.0 * experts.width * model.hidden, 1.0
        num_chosen, num_touched = experts.num_active * num_tokens / self.tp, experts.touched(num_tokens) / self.tp
        if model.whole_experts and self.tp > 1:
            busiest = busiest_share(num_chosen, self.tp) * math.ceil(experts.num / self.tp) * self.tp / experts.num
            num_touched = min(num_touched * busiest, math.ceil(experts.num / self.tp))
        rate = self._rate if model.experts_computed_in == BFLOAT16 else self._weights_rate
        fitted = self._kernels.experts[model.experts_computed_in]
        num_bytes = params * num_touched * model.expert_bytes
        taken_s = fitted.seconds(2 * params * num_chosen * busiest, num_bytes, rate, self.gpu.memory_rate)
        return self._num_routed_layers() * taken_s

    def _elementwise_bytes(self, num_tokens: float) -> float:
        """Bytes of two norms with residual additions on every GPU, and of the activation on its share."""
        model, experts = self.model, self.model.experts
        hidden = 2 * 4 * model.hidden * model.layers
        width = float(model.width * model.layers)
        if experts is not None:
            num = experts.num_active + experts.num_shared
            width = model.width * experts.num_dense_layers + experts.width * num * self._num_routed_layers()
        return num_tokens * ACTIVATION_BYTES * (hidden + 3 * width / self.tp)
