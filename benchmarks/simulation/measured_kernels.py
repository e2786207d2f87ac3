"""Step times from kernels that NVIDIA measured: the tables of `aiconfigurator`, looked up and interpolated.

A step is the products of all its tokens, attention of the rows with several tokens, and attention of the rows with one.
Each size of a product is looked up once; attention is looked up for sizes on a grid.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable
from importlib import import_module
from typing import Any

from cluster.simulate.latency.shapes import BFLOAT16, FP8_BLOCK
from cluster.simulate.latency.step_work import StepWork
from protos.errors import Misconfigured

BACKEND = "trtllm"
"""The library whose kernels were measured: aiconfigurator's default."""
SYSTEMS = {"a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm"}
CHECKPOINTS = {
    "llama-3-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3-405b": "meta-llama/Meta-Llama-3.1-405B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
}
ATTENTION = ("context_attention", "context_mla_block", "generation_attention", "generation_mla_block")
LOGITS = ("context_logits_gemm", "generation_logits_gemm")
POINTS = sorted({round(2 ** (number / 4)) for number in range(4 * 25)})
"""Points of the grid per doubling."""


class Tables:
    """Measured kernels of a model on `tp` GPUs, of prefill (`context`) and decode (`generation`). Raises Misconfigured
    for sizes that were not measured, and without the package."""

    def __init__(self, *, gpu: str, model: str, tp: int = 1, dtype: str = BFLOAT16, backend: str = BACKEND) -> None:
        self._engine = _compile(gpu, model, tp, dtype, backend)
        self.context = _Phase(self._engine.evaluate_context_ops)
        self.generation = _Phase(self._engine.evaluate_generation_ops)


class _Phase:
    """The operations of prefill, or of decode. Times are in seconds."""

    def __init__(self, evaluate: Callable[..., list[tuple[Any, ...]]]) -> None:
        self._evaluate = evaluate
        names = self._names()
        self._attention = [number for number, name in enumerate(names) if name in ATTENTION]
        self._logits = [number for number, name in enumerate(names) if name in LOGITS]
        attended = {*self._attention, *self._logits}
        self._others = [number for number in range(len(names)) if number not in attended]

    def by_name(self, num_tokens: int, num_rows: int) -> dict[str, float]:
        """All operations but attention."""
        found = self._evaluate(self._others, batch_size=num_rows, s=1, x=num_tokens)
        found += self._evaluate(self._logits, batch_size=num_rows, s=1, x=num_rows)
        return {name: milliseconds / 1000 for name, milliseconds, *_ in found}

    def others_s(self, num_tokens: int, num_rows: int) -> float:
        return sum(self.by_name(num_tokens, num_rows).values())

    def attention_s(self, num_rows: int, num_tokens: int, num_before: int = 0) -> float:
        """Attention of this many rows, each with this many tokens after `num_before`; in decode `num_tokens` are the
        context."""
        found = self._evaluate(self._attention, batch_size=num_rows, s=num_tokens, prefix=num_before)
        return float(sum(milliseconds for _, milliseconds, *_ in found)) / 1000

    def _names(self) -> list[str]:
        names: list[str] = []
        while True:
            try:
                ((name, *_),) = self._evaluate([len(names)], batch_size=1, s=128)
            except ValueError:  # beyond the last measured size
                return names
            names.append(name)


class Aiconfigurator:
    """A `Latency` of the tables: each size of a product is looked up once; attention is interpolated between points of
    a grid."""

    def __init__(self, tables: Tables, *, host_s: float = 0.0) -> None:
        self._tables = tables
        self._host_s = host_s
        self._others: dict[tuple[float, float, bool], float] = {}
        self._decode = _Grid(lambda rows, context: tables.generation.attention_s(rows, context))
        self._prefill = _Grid(lambda rows, tokens, before: tables.context.attention_s(rows, tokens, before - 1))

    def step_s(self, step: StepWork) -> float:
        num_prompts = step.num_rows - step.num_single
        sizes = (step.num_tokens, step.num_rows, num_prompts > 0)
        taken_s = self._others.get(sizes)
        if taken_s is None:
            phase = self._tables.context if num_prompts else self._tables.generation
            others_s = phase.others_s(_whole(step.num_tokens), _whole(step.num_rows))
            taken_s = self._others[sizes] = self._host_s + others_s
        if step.num_single:
            taken_s += self._decode.at(step.num_single, step.num_single_read / step.num_single)
        if num_prompts:
            tokens = (step.num_tokens - step.num_single) / num_prompts
            attended = (step.num_attended - step.num_single_read) / num_prompts
            before = max(0.0, attended / tokens - (tokens + 1) / 2)
            taken_s += self._prefill.at(num_prompts, tokens, before + 1)
        return taken_s


class _Grid:
    """Interpolates `exact` linearly between grid points whose distance is proportional to their size. Caches its
    results."""

    def __init__(self, exact: Callable[..., float]) -> None:
        self._exact = exact
        self._known: dict[tuple[int, ...], float] = {}

    def at(self, *sizes: float) -> float:
        ends = [_between(max(1.0, size)) for size in sizes]
        found = 0.0
        for corner in range(2 ** len(ends)):
            weight, point = 1.0, []
            for number, (low, high, share) in enumerate(ends):
                is_high = corner >> number & 1
                weight *= share if is_high else 1 - share
                point.append(high if is_high else low)
            if weight:
                found += weight * self._look_up(tuple(point))
        return found

    def _look_up(self, point: tuple[int, ...]) -> float:
        known = self._known.get(point)
        if known is None:
            known = self._known[point] = self._exact(*point)
        return known


def _between(size: float) -> tuple[int, int, float]:
    """The two grid points around a size, and its position between them, from 0 to 1."""
    number = min(bisect_right(POINTS, size), len(POINTS) - 1)
    low, high = POINTS[number - 1], POINTS[number]
    return low, high, (size - low) / (high - low)


def _whole(number: float) -> int:
    return max(1, round(number))


def _compile(gpu: str, model: str, tp: int, dtype: str, backend: str) -> Any:
    """Raises Misconfigured."""
    try:
        sdk = import_module("aiconfigurator_core.sdk")
    except ImportError as error:
        raise Misconfigured(
            "NVIDIA's package of measured kernels is not installed: .venv/bin/pip install aiconfigurator-core==0.12.0"
        ) from error
    weights = None if dtype == FP8_BLOCK else dtype
    experts = {"moe_tp_size": tp, "moe_ep_size": 1, "moe_quant_mode": weights} if model == "deepseek-v3" else {}
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    try:
        engine = sdk.EngineHandle.compile(
            CHECKPOINTS[model], SYSTEMS[gpu], backend, tp_size=tp, gemm_quant_mode=weights,
            kvcache_quant_mode=BFLOAT16, fmha_quant_mode=BFLOAT16, **experts,
        )  # fmt: skip
        engine.predict_prefill_latency(1, 1024)
        engine.predict_decode_latency(1, 1024)
    except Exception as error:  # the package has many types of its own
        why = str(error).partition(" at /")[0]
        raise Misconfigured(f"there are no figures of {model} ({dtype}) on {tp} x {gpu}: {why}") from error
    return engine
