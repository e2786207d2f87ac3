"""Coefficients of kernels: `fitted.json`, which `python -m benchmarks.simulation.step_fit` writes with their source."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from cluster.simulate.latency.kernels import KernelTimes

PATH = Path(__file__).with_suffix(".json")
FITTED = msgspec.convert(json.loads(PATH.read_text(encoding="utf-8"))["gpus"], dict[str, KernelTimes])
