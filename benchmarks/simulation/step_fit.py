"""Fits the roofline of `baton simulate` to the measured kernels of NVIDIA's aiconfigurator.

    .venv/bin/pip install aiconfigurator-core==0.12.0
    python -m benchmarks.simulation.step_fit          # writes cluster/simulate/latency/fitted.json
    python -m benchmarks.simulation.step_errors       # then: the table of errors in benchmarks/results

Each kind of kernel of each GPU is fitted by itself, by least squares of logarithms, on the models and sizes below; no
other model, number of ranks or size is fitted to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from benchmarks.simulation.measured_kernels import BACKEND, Tables
from benchmarks.simulation.step_errors import FITTED_ON, MIXTURE
from cluster.simulate.latency.kernels import PATH, AllReduceTimes, AttentionTimes, KernelTimes, ProductTimes
from cluster.simulate.latency.roofline import Product, Roofline
from cluster.simulate.latency.shapes import BFLOAT16, FP8, FP8_BLOCK, GPUS, MODELS, Experts, ModelShape
from cluster.simulate.latency.step_work import StepWork, step_of
from protos.errors import Misconfigured

MIXTURE_RANKS = {BFLOAT16: (2,), FP8_BLOCK: (1, 4, 8)}  # routed experts and attention: the last of them
TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PROMPTS = ((1, 128), (1, 512), (1, 1024), (1, 2048), (1, 4096), (1, 8192), (1, 16_384), (4, 1024), (8, 512), (16, 128))
ANSWERS = (
    (1, 128), (1, 1024), (1, 8192), (1, 32_768), (4, 1024), (8, 4096), (16, 512), (16, 2048), (32, 4096), (32, 8192),
    (64, 1024), (64, 4096), (128, 512), (128, 2048), (256, 1024), (256, 4096),
)  # fmt: skip
"""Sequences and the tokens of each."""
START = ProductTimes(compute_share=0.7, memory_share=0.8, sharpness=2.0, fixed_s=5e-6)
START_ATTENTION = AttentionTimes(
    compute_share=0.6, memory_share=0.8, prefill_fixed_s=1e-5, decode_fixed_s=1e-5, element_s=2e-12, row_s=2e-9
)
START_REDUCE = AllReduceTimes(small_fixed_s=4e-6, small_share=0.6, large_fixed_s=3e-5, large_share=0.8)
LIMITS = {
    "compute_share": (0.01, 1.0), "memory_share": (0.05, 1.0), "sharpness": (1.0, 6.0), "small_share": (0.05, 1.5),
    "large_share": (0.05, 1.5),
}  # fmt: skip
DENSE = ("qkv_gemm", "proj_gemm", "gate_ffn1_gemm", "ffn2_gemm", "logits_gemm")
SHARED = ("shared_gate_up_gemm", "shared_ffn2_gemm")
REDUCED = ("ar_1", "ar_2", "embedding_ar")


class FitPoint(NamedTuple):
    """`predicted`, given some coefficients, should return `seconds`."""

    predicted: Callable[[KernelTimes], float]
    seconds: float


class MeasuredSet(NamedTuple):
    """A model on `tp` GPUs, and its measured kernels."""

    gpu: str
    model: ModelShape
    tp: int
    tables: Tables

    def roofline(self, kernels: KernelTimes) -> Roofline:
        return Roofline(gpu=GPUS[self.gpu], model=self.model, tp=self.tp, kernels=kernels)

    def measured(self, names: Sequence[str], num_tokens: int) -> float:
        """Of operations of a prompt, one of whose tokens is sampled."""
        found = self.tables.context.by_name(num_tokens, 1)
        return sum(found[f"context_{name}"] for name in names)


def main() -> None:
    source = (
        f"aiconfigurator-core {version('aiconfigurator-core')} (NVIDIA, Apache-2.0), its measured kernels of {BACKEND}"
    )
    fitted = {"source": source, "gpus": {gpu: asdict(fit_gpu(gpu)) for gpu in GPUS}}
    PATH.write_text(json.dumps(fitted, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {PATH}")


def fit_gpu(gpu: str) -> KernelTimes:
    kernels = KernelTimes(
        products={}, experts={}, attention=START_ATTENTION, latent=START_ATTENTION, reduce=START_REDUCE
    )
    dtypes = (BFLOAT16,) if GPUS[gpu].fp8_flops is None else (BFLOAT16, FP8)
    for dtype in dtypes:
        points = [one for of in dense_sets(gpu, dtype) for one in of_products(of)]
        kernels = fit(f"{gpu} products, {dtype}", START, points, with_products(kernels, dtype))
    sets = list(dense_sets(gpu, BFLOAT16))
    points = [one for of in sets for one in of_attention(of)]
    kernels = fit(f"{gpu} attention", START_ATTENTION, points, lambda one: replace(kernels, attention=one))
    points = [one for of in sets if of.tp > 1 for one in of_reduce(of)]
    kernels = fit(f"{gpu} all-reduce", START_REDUCE, points, lambda one: replace(kernels, reduce=one))
    return fit_mixture(gpu, kernels)


def dense_sets(gpu: str, dtype: str) -> Iterator[MeasuredSet]:
    for name, ranks in FITTED_ON.items():
        for tp in ranks:
            tables = Tables(gpu=gpu, model=name, tp=tp, dtype=dtype)
            yield MeasuredSet(gpu, replace(MODELS[name], dtype=dtype), tp, tables)


def fit_mixture(gpu: str, kernels: KernelTimes) -> KernelTimes:
    """Products with scales of blocks, on shared experts; routed experts; latent attention. Experts with a scale a
    tensor are taken to be as fast as those with scales of blocks."""
    for dtype in (BFLOAT16,) if GPUS[gpu].fp8_flops is None else (BFLOAT16, FP8_BLOCK):
        model = replace(MODELS[MIXTURE], dtype=dtype)
        assert model.experts is not None
        try:
            tables = {tp: Tables(gpu=gpu, model=MIXTURE, tp=tp, dtype=dtype) for tp in MIXTURE_RANKS[dtype]}
        except Misconfigured as error:
            print(error.message)
            continue
        sets = [MeasuredSet(gpu, model, tp, of) for tp, of in tables.items()]
        if dtype == FP8_BLOCK:
            points = [one for of in sets for one in of_shared_experts(of, model.experts)]
            kernels = fit(f"{gpu} products, {dtype}", START, points, with_products(kernels, dtype))
        points = of_routed_experts(sets[-1], model.experts)
        kernels = fit(f"{gpu} experts, {dtype}", START, points, with_experts(kernels, dtype))
        points = of_attention(sets[-1])
        kernels = fit(f"{gpu} latent attention", START_ATTENTION, points, partial(with_latent, kernels))
    return kernels


def with_latent(kernels: KernelTimes, latent: AttentionTimes) -> KernelTimes:
    return replace(kernels, latent=latent)


def with_experts(kernels: KernelTimes, dtype: str) -> Callable[[ProductTimes], KernelTimes]:
    dtypes = (FP8, FP8_BLOCK) if dtype == FP8_BLOCK else (dtype,)
    return lambda one: replace(kernels, experts={**kernels.experts, **dict.fromkeys(dtypes, one)})


def with_products(kernels: KernelTimes, dtype: str) -> Callable[[ProductTimes], KernelTimes]:
    return lambda one: replace(kernels, products={**kernels.products, dtype: one})


def of_products(of: MeasuredSet) -> list[FitPoint]:
    def predicted(kernels: KernelTimes, num: int) -> float:
        roofline = of.roofline(kernels)
        every = [*roofline.projections(), *roofline.mlps()]
        return roofline.products_s(every, num, of.model.dtype)

    return [FitPoint(partial(predicted, num=num), of.measured(DENSE[:-1], num)) for num in TOKENS]


def of_reduce(of: MeasuredSet) -> list[FitPoint]:
    def predicted(kernels: KernelTimes, num: int) -> float:
        return of.roofline(kernels).parts(step_of([(num, num)])).reduce

    return [FitPoint(partial(predicted, num=num), of.measured(REDUCED, num)) for num in TOKENS]


def of_shared_experts(of: MeasuredSet, experts: Experts) -> list[FitPoint]:
    """As many as aiconfigurator counts: of every layer."""
    width, hidden, layers = experts.width / of.tp, of.model.hidden, of.model.layers
    products = [Product(2 * width, hidden, layers), Product(hidden, width, layers)]

    def predicted(kernels: KernelTimes, num: int) -> float:
        return of.roofline(kernels).products_s(products, num, FP8_BLOCK)

    return [FitPoint(partial(predicted, num=num), of.measured(SHARED, num)) for num in TOKENS]


def of_routed_experts(of: MeasuredSet, experts: Experts) -> list[FitPoint]:
    share = 1 - experts.num_dense_layers / of.model.layers

    def predicted(kernels: KernelTimes, num: int) -> float:
        return of.roofline(kernels).experts_s(num)

    return [FitPoint(partial(predicted, num=num), of.measured(["moe"], num) * share) for num in TOKENS]


def of_attention(of: MeasuredSet) -> list[FitPoint]:
    """Of latent attention, with the products around it."""

    def predicted(kernels: KernelTimes, step: StepWork) -> float:
        roofline = of.roofline(kernels)
        seconds = roofline.attention_s(step)
        if of.model.latent is not None:
            seconds += roofline.products_s(roofline.projections(), step.num_tokens, of.model.dtype)
        return seconds

    shapes = [(rows, tokens, True) for rows, tokens in PROMPTS] + [(rows, tokens, False) for rows, tokens in ANSWERS]
    found = []
    for rows, tokens, is_prompt in shapes:
        step = step_of([(tokens if is_prompt else 1, tokens)] * rows)

        phase = of.tables.context if is_prompt else of.tables.generation
        found.append(FitPoint(partial(predicted, step=step), phase.attention_s(rows, tokens)))
    return found


def fit(name: str, start: Any, points: Sequence[FitPoint], within: Callable[[Any], KernelTimes]) -> KernelTimes:
    """Coefficients are never negative: their logarithms are fitted."""
    names = [one.name for one in fields(start)]
    limits = [LIMITS.get(one, (1e-15, 1e-3)) for one in names]
    seconds = np.array([point.seconds for point in points])

    def made(logs: Any) -> Any:
        return type(start)(**{one: rounded(math.exp(log)) for one, log in zip(names, logs, strict=True)})

    def errors(logs: Any) -> Any:
        exact = type(start)(**dict(zip(names, np.exp(logs).tolist(), strict=True)))
        kernels = within(exact)
        return np.log(np.array([point.predicted(kernels) for point in points]) / seconds)

    first = np.log([getattr(start, one) for one in names])
    found = least_squares(errors, first, bounds=np.log(np.array(limits).T), loss="soft_l1", f_scale=0.1)
    off = np.abs(np.expm1(errors(found.x)))
    print(
        f"{name}: {made(found.x)}\n  {len(points)} points, off by {off.mean():.1%} on average, {off.max():.1%} at most"
    )
    return within(made(found.x))


def rounded(number: float) -> float:
    return float(f"{number:.3g}")


if __name__ == "__main__":
    main()
