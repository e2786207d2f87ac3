"""Every kernel compiles to machine code for GPUs that are not here, within their limits, as its comments say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.kernels.compiled import MAX_SHARED
from tests.kernels.launches import LAUNCHES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # ninety kernels of four capabilities: two minutes of CPU time

NEAREST_TO_LIMITS = (
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
BLACKWELL = ("latent decode", "latent prefill", "8 bits, 512 rows", "fp8, 512 rows", "Q4_K experts, 64 rows")
REPRESENTATIVES = {
    80: NEAREST_TO_LIMITS,
    100: (*NEAREST_TO_LIMITS, *BLACKWELL, "decode, fp8 KV", "4 bits, 512 rows", "int8, 512 rows", "experts, many rows"),
    120: (*NEAREST_TO_LIMITS, *BLACKWELL, "prefill, short chunk"),
}
"""All launches are compiled for 9.0. For others the launches of the largest tiles, of each form of matrix product once:
all of them would take as long as those of 9.0, and `python -m tests.kernels.compiled 100 bfloat16` compiles them."""

MAY_SPILL = {"Q4_K experts, 64 rows": 80, "latent decode": 64, "latent prefill": 64, "prefill, int8 KV": 64}
"""Bytes a thread, on 9.0. Of experts a tile of many rows with scales and minimums in two levels; the others were faster
on an H200 than tiles that do not spill."""

MOST_SPILLED = {80: 64, 100: 100, 120: 100}
LEAST_REGISTERS = 16  # a kernel that Triton could not make is one `trap` with four registers
LITTLE = {"embed"}  # copies rows with 14 registers
MOST_COLUMNS = 512  # of tensor memory
WIDE_UNITS = {90: "wgmma", 100: "tcgen05"}


@pytest.fixture(scope="module", params=sorted(MAX_SHARED))
def compiled(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> tuple[int, list[dict[str, Any]]]:
    """(capability, what each kernel costs)."""
    return request.param, _costs(pytestconfig, request.param, "bfloat16", REPRESENTATIVES.get(request.param, ()))


def _costs(pytestconfig: pytest.Config, capability: int, dtype: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """The interpreter must not be on, hence a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    assert pytestconfig.cache
    environment["TRITON_CACHE_DIR"] = str(pytestconfig.cache.mkdir("triton"))
    program = [sys.executable, "-m", "tests.kernels.compiled", str(capability), dtype, *names]
    output = subprocess.check_output(program, cwd=pytestconfig.rootpath, env=environment, text=True)
    return [json.loads(line) for line in output.splitlines()]


def test_kernels_fit_and_do_not_spill(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    """9.0 is what the tiles were chosen for; elsewhere a few addresses may spill."""
    capability, costs = compiled
    assert {cost["launch"] for cost in costs} == set(REPRESENTATIVES.get(capability, LAUNCHES))
    for cost in costs:
        assert cost["shared"] <= MAX_SHARED[capability], cost
        assert cost["columns"] <= MOST_COLUMNS, cost
        assert cost["spilled"] <= MOST_SPILLED.get(capability, MAY_SPILL.get(cost["launch"], 0)), cost
        assert cost["registers"] >= LEAST_REGISTERS or cost["launch"] in LITTLE, cost


@pytest.mark.parametrize("capability", sorted(MAX_SHARED))
def test_kernels_of_twice_the_bytes_fit_in_float32(capability: int, pytestconfig: pytest.Config) -> None:
    for cost in _costs(pytestconfig, capability, "float32", ("latent decode", "latent prefill", "experts, many rows")):
        assert cost["shared"] <= MAX_SHARED[capability], cost
        assert cost["columns"] <= MOST_COLUMNS, cost
        assert cost["spilled"] == 0, cost
        assert cost["registers"] >= LEAST_REGISTERS, cost


def test_attention_multiplies_on_matrix_units_while_it_loads(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    capability, costs = compiled
    attention = {cost["launch"]: cost for cost in costs if cost["kernel"] in ("_decode", "_prefill")}
    for launch, cost in attention.items():
        assert cost["matrix"] == (WIDE_UNITS.get(capability, "mma") if "prefill" in launch else "mma"), cost
        assert cost["under_way"] >= 2, f"{cost}: the compiler has given up loading ahead"
    occupancy = 228 * 1024 // (attention["decode"]["shared"] + 1024)
    if capability == 90:
        assert occupancy >= 2, "one program would leave a multiprocessor idle while it begins and ends"


def test_quantised_products_multiply_on_matrix_units_while_they_load(
    compiled: tuple[int, list[dict[str, Any]]],
) -> None:
    capability, costs = compiled
    names = "_grouped", "_bytes", "_code_experts", "_byte_experts"
    products = [cost for cost in costs if cost["kernel"] in names]
    assert len({cost["launch"] for cost in products}) >= (22 if capability == 90 else 4)
    for cost in products:
        integers = capability != 90 and "int8" in cost["launch"]  # which Triton leaves to the older units on 10.x
        assert cost["matrix"] == ("mma" if integers else WIDE_UNITS.get(capability, "mma")), cost
        assert cost["under_way"] >= 2, f"{cost}: the compiler has given up loading ahead"


def test_a_code_of_four_bits_takes_few_instructions(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    """A multiprocessor of an H100 starts 4.5 instructions of a lane while memory brings it a code of 4 bits
    (132 multiprocessors of 128 lanes at 1.76 GHz, 3.35 TB/s): with more, instructions are the floor, not memory."""
    capability, costs = compiled
    if capability not in (80, 90):
        return  # a B200 starts 2.2 while memory brings a code: instructions are the floor there
    [cost] = [cost for cost in costs if cost["launch"] == "4 bits, 1 rows"]
    codes_of_lane = 128 * 128 / (32 * cost["warps"])
    assert cost["loop"] / codes_of_lane < 0.85 * 4.5, cost
    assert 65536 // (cost["registers"] * 32 * cost["warps"]) >= 4, "the tile's comment promises four programs"


@pytest.mark.parametrize(
    ("family", "quantize", "kv_dtype"),
    [
        ("mistral", "int4", "int8"),
        ("qwen3_moe", "int8", "fp8"),
        ("qwen3_moe", "fp8", "auto"),
        ("deepseek_v3", "off", "auto"),
    ],
)
def test_a_warm_model_compiles_nothing(family: str, quantize: str, kv_dtype: str, pytestconfig: pytest.Config) -> None:
    """Otherwise a request would wait for the compiler, on all ranks."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "tests.kernels.specialised", family, quantize, kv_dtype]
    output = subprocess.check_output(program, cwd=pytestconfig.rootpath, env=environment, text=True)
    compilations = json.loads(output)
    assert {"_rms_norm", "_draw", "_copy_runs"} <= set(compilations["warmed"])
    assert compilations["later"] == []
