"""Compares `baton simulate`'s step times with measured kernels (NVIDIA's aiconfigurator).

    .venv/bin/pip install aiconfigurator-core==0.12.0
    python -m benchmarks.simulation.step_errors

writes the points to benchmarks/results/step-times.json, and the table into benchmarks/results/simulation.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

from benchmarks.simulation.measured_kernels import BACKEND, Aiconfigurator, Tables
from cluster.simulate.latency.roofline import Roofline
from cluster.simulate.latency.shapes import GPUS, MODELS
from cluster.simulate.latency.step_work import StepWork, step_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "step-times.json"
NOTES = ROOT / "benchmarks" / "results" / "simulation.md"
BEGIN, END = (
    "<!-- table of errors: python -m benchmarks.simulation.step_errors -->",
    "<!-- end of the table of errors -->",
)
FITTED_ON = {"llama-3-8b": (1, 2), "llama-3-70b": (2, 8)}
"""Models and numbers of GPUs whose kernels `benchmarks.simulation.step_fit` uses; and the mixture's, on 8."""
MIXTURE = "deepseek-v3"
CLUSTERS = (
    ("a100", "llama-3-8b", 1), ("a100", "llama-3-70b", 4), ("a100", "qwen3-32b", 2),
    ("h100", "llama-3-8b", 1), ("h100", "llama-3-70b", 4), ("h100", "llama-3-70b", 8), ("h100", "qwen3-32b", 2),
    ("h200", "llama-3-8b", 1), ("h200", "llama-3-70b", 4), ("h200", "qwen3-32b", 1), ("h200", "llama-3-405b", 8),
    ("b200", "llama-3-8b", 1), ("b200", "llama-3-70b", 4), ("b200", "qwen3-32b", 2), ("b200", "llama-3-405b", 8),
    ("h200", "deepseek-v3", 8), ("b200", "deepseek-v3", 8),
)  # fmt: skip
PREFILL = ((1, 1024), (1, 4096), (1, 8192), (4, 1024))  # sequences, tokens of each
DECODE = ((1, 1024), (1, 8192), (16, 2048), (64, 4096), (128, 1024))  # sequences, context of each
DENSE_AIM, DENSE_WORST, MIXTURE_WORST = 0.08, 0.15, 0.20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """A step of `rows` sequences, of `tokens` each, of which one is computed where it decodes."""

    gpu: str
    model: str
    tp: int
    phase: str
    rows: int
    tokens: int
    measured_s: float

    @property
    def step(self) -> StepWork:
        return step_of([(self.tokens if self.phase == "prefill" else 1, self.tokens)] * self.rows)

    @property
    def error(self) -> float:
        predicted_s = Roofline(gpu=GPUS[self.gpu], model=MODELS[self.model], tp=self.tp).step_s(self.step)
        return predicted_s / self.measured_s - 1

    @property
    def is_fitted(self) -> bool:
        """Whether the coefficients were fitted to kernels of this model and number of GPUs."""
        return self.model == MIXTURE or self.tp in FITTED_ON.get(self.model, ())


def main() -> None:
    points = [point for gpu, model, tp in CLUSTERS for point in measured(gpu, model, tp)]
    document = {
        "source": f"aiconfigurator-core {version('aiconfigurator-core')}, kernels of {BACKEND}",
        "points": [asdict(point) for point in points],
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    text = NOTES.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    NOTES.write_text(f"{before}{BEGIN}\n{table(points)}\n{END}{after}", encoding="utf-8")
    print(table(points))


def read() -> list[StepPoint]:
    return [StepPoint(**one) for one in json.loads(RESULTS.read_text(encoding="utf-8"))["points"]]


def measured(gpu: str, model: str, tp: int) -> list[StepPoint]:
    latency = Aiconfigurator(Tables(gpu=gpu, model=model, tp=tp, dtype=MODELS[model].dtype))
    sizes = [("prefill", *one) for one in PREFILL] + [("decode", *one) for one in DECODE]
    found = []
    for phase, rows, tokens in sizes:
        step = step_of([(tokens if phase == "prefill" else 1, tokens)] * rows)
        seconds = float(f"{latency.step_s(step):.4g}")
        found.append(StepPoint(gpu=gpu, model=model, tp=tp, phase=phase, rows=rows, tokens=tokens, measured_s=seconds))
    return found


def table(points: Sequence[StepPoint]) -> str:
    """A line for each model on each GPU, and what they come to."""
    heads = [f"{rows} x {tokens:,}" for rows, tokens in (*PREFILL, *DECODE)]
    lines = [
        f"| | TP | prefill {' | '.join(heads[: len(PREFILL)])} | decode {' | '.join(heads[len(PREFILL) :])} |",
        "|---|---|" + "---|" * len(heads),
    ]
    for gpu, model, tp in CLUSTERS:
        own = [point for point in points if (point.gpu, point.model, point.tp) == (gpu, model, tp)]
        cells = [f"{point.measured_s * 1000:,.1f} {point.error:+.0%}" for point in own]
        star = "" if own[0].is_fitted else " *"
        lines.append(f"| {gpu}, {model}{star} | {tp} | {' | '.join(cells)} |")
    dense = [point for point in points if MODELS[point.model].experts is None]
    held_out = [point for point in dense if not point.is_fitted]
    mixtures = [point for point in points if MODELS[point.model].experts is not None]
    lines += [
        "",
        f"- Dense models: {summary(dense)}.",
        f"- Dense models that were not fitted to (*): {summary(held_out)}.",
        f"- DeepSeek-V3: {summary(mixtures)}.",
    ]
    return "\n".join(lines)


def summary(points: Iterable[StepPoint]) -> str:
    errors = [abs(point.error) for point in points]
    return f"{len(errors)} points, {fmean(errors):.1%} on average, {max(errors):.1%} at worst"


if __name__ == "__main__":
    main()
