"""Every kernel compiles to machine code for GPUs that are not here, within their limits, as its comments say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.kernels.compiled import MAX_SHARED

pytestmark = pytest.mark.timeout(900)  # fifty kernels, compiled by the first test: a minute of CPU time

NEAREST_TO_LIMITS = {
    80: (
        "decode",
        "prefill",
        "prefill, window",
        "4 bits, 1 rows",
        "Q4_K, 512 rows",
        "Q6_K, 512 rows",
        "decode, int8 KV",
        "prefill, int8 KV",
        "4 bits experts, 64 rows",
    )
}
"""Of 8.0 only the kernels with the largest tiles are compiled: all of them would take as long as those of 9.0."""

MAY_SPILL = {"Q4_K experts, 64 rows": 80, "latent decode": 64, "latent prefill": 64, "prefill, int8 KV": 64}
"""Bytes a thread, on 9.0. Of experts a tile of many rows with scales and minimums in two levels; the others were faster
on an H200 than tiles that do not spill."""


@pytest.fixture(scope="module", params=sorted(MAX_SHARED))
def compiled(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> tuple[int, list[dict[str, Any]]]:
    """(capability, what each kernel costs). The interpreter must not be on, hence a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    assert pytestconfig.cache
    environment["TRITON_CACHE_DIR"] = str(pytestconfig.cache.mkdir("triton"))
    names = NEAREST_TO_LIMITS.get(request.param, ())
    program = [sys.executable, "-m", "tests.kernels.compiled", str(request.param), "bfloat16", *names]
    output = subprocess.check_output(program, cwd=pytestconfig.rootpath, env=environment, text=True)
    return request.param, [json.loads(line) for line in output.splitlines()]


@pytest.mark.slow
def test_kernels_fit_and_do_not_spill(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    """Prefill and Q4_K on 8.x may spill a few addresses; on 9.0, which the tiles were chosen for, one kernel does."""
    capability, costs = compiled
    assert len(costs) >= 6
    for cost in costs:
        assert cost["shared"] <= MAX_SHARED[capability], cost
        allowed = MAY_SPILL.get(cost["launch"], 0) if capability >= 90 else 64
        assert cost["spilled"] <= allowed, cost


@pytest.mark.slow
def test_attention_multiplies_on_matrix_units_while_it_loads(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    capability, costs = compiled
    attention = {cost["launch"]: cost for cost in costs if cost["kernel"] in ("_decode", "_prefill")}
    for launch, cost in attention.items():
        assert cost["matrix"] == ("wgmma" if capability >= 90 and "prefill" in launch else "mma"), cost
        assert cost["under_way"] >= 2, f"{cost}: the compiler has given up loading ahead"
    occupancy = 228 * 1024 // (attention["decode"]["shared"] + 1024)
    if capability == 90:
        assert occupancy >= 2, "one program would leave a multiprocessor idle while it begins and ends"


@pytest.mark.slow
def test_quantised_products_multiply_on_matrix_units_while_they_load(
    compiled: tuple[int, list[dict[str, Any]]],
) -> None:
    """A copy is a tile of one operand: with two for each step, several steps are under way."""
    capability, costs = compiled
    names = "_grouped", "_bytes", "_code_experts", "_byte_experts"
    products = [cost for cost in costs if cost["kernel"] in names]
    assert len({cost["launch"] for cost in products}) == (22 if capability >= 90 else 4)
    for cost in products:
        assert cost["matrix"] == ("wgmma" if capability >= 90 else "mma"), cost
        assert cost["under_way"] >= 2, f"{cost}: the compiler has given up loading ahead"


@pytest.mark.slow
def test_a_code_of_four_bits_takes_few_instructions(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    """A multiprocessor of an H100 starts 4.5 instructions of a lane while memory brings it a code of 4 bits
    (132 multiprocessors of 128 lanes at 1.76 GHz, 3.35 TB/s): with more, instructions are the floor, not memory."""
    _, costs = compiled
    [cost] = [cost for cost in costs if cost["launch"] == "4 bits, 1 rows"]
    codes_of_lane = 128 * 128 / (32 * cost["warps"])
    assert cost["loop"] / codes_of_lane < 0.85 * 4.5, cost
    assert 65536 // (cost["registers"] * 32 * cost["warps"]) >= 4, "the tile's comment promises four programs"
