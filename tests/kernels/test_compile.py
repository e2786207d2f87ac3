"""Every kernel compiles to machine code for GPUs that are not here, within their limits, as its comments say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

MAX_SHARED = {80: 99 * 1024, 90: 227 * 1024}
"""Bytes a program may have (CUDA C++ Programming Guide, technical specifications by compute capability). 8.0 itself has
163 KiB; 8.6 and 8.9, which run the same code, have 99."""


@pytest.fixture(scope="module", params=sorted(MAX_SHARED))
def compiled(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> tuple[int, list[dict[str, Any]]]:
    """(capability, what each kernel costs). The interpreter must not be on, hence a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    assert pytestconfig.cache
    environment["TRITON_CACHE_DIR"] = str(pytestconfig.cache.mkdir("triton"))
    program = [sys.executable, "-m", "tests.kernels.compiled", str(request.param), "bfloat16"]
    output = subprocess.check_output(program, cwd=pytestconfig.rootpath, env=environment, text=True)
    return request.param, [json.loads(line) for line in output.splitlines()]


@pytest.mark.slow
def test_kernels_fit_and_do_not_spill(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    """Prefill on 8.x may spill a few addresses; nothing spills on 9.0, which the tiles were chosen for."""
    capability, costs = compiled
    assert len(costs) > 10
    for cost in costs:
        assert cost["shared"] <= MAX_SHARED[capability], cost
        assert cost["spilled"] <= (0 if capability >= 90 else 64), cost


@pytest.mark.slow
def test_attention_multiplies_on_matrix_units_while_it_loads(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    capability, costs = compiled
    attention = {cost["launch"]: cost for cost in costs if cost["kernel"] in ("_decode", "_prefill")}
    for launch, cost in attention.items():
        assert cost["matrix"] == ("wgmma" if capability >= 90 and "prefill" in launch else "mma"), cost
        assert cost["under_way"] >= 2, f"{cost}: the compiler has given up loading ahead"
    occupancy = 228 * 1024 // (attention["decode"]["shared"] + 1024)
    if capability == 90:
        assert occupancy >= 3, "the decode tile's comment promises three programs a multiprocessor"
        assert 65536 // (attention["decode"]["registers"] * 128) >= 3
