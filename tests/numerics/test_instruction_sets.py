"""The compiled CPU kernels as processors that can do less than this one would run them: every path is tested."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protos.values import KVLayout
from tests.numerics.filled import ROWS, filled, normal
from tests.numerics.quantised_weights import E4M3, IQ4, NF4, grouped, of_form
from workers.attention.backend import AttentionInputs, AttentionOptions
from workers.attention.cpu import NativeAttention, cpu_attention
from workers.attention.torch_attention import TorchAttention
from workers.kernels import twins
from workers.kernels.cpu.native_build import Native, Tiles, compile_library, native, native_tiles
from workers.kernels.cpu.products import PackedFloats
from workers.kernels.cpu.quantised import PackedQuantised
from workers.kv.kinds import with_kv_dtype
from workers.worker_config import KVDtype

pytestmark = pytest.mark.timeout(360)  # a library takes half a minute to compile on an idle machine

MACHINES = {
    "x86-64": {"sse2"},
    "x86-64-v3": {"avx2", "fma"},
    "cooperlake": {"avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni"},
    "sapphirerapids": {"amx_tile", "amx_bf16"},
}
"""Least first, with the flags of the processor that decide which code is compiled."""


def flags_of_this_processor() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in [*MACHINES][:-1]])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    flags = flags_of_this_processor()
    better = list(MACHINES)[list(MACHINES).index(request.param) + 1 :]
    if native(torch.float32) is None or not any(MACHINES[machine] <= flags for machine in better):
        pytest.skip(f"no C++ compiler, or this processor can do no more than {request.param}: other tests run its code")
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as environment:
        if request.param == "x86-64":
            environment.setenv("CXX", str(less_optimising_compiler(folder)))
        return ctypes.CDLL(str(compile_library(folder, machine=request.param, timeout_s=600.0)))


def less_optimising_compiler(folder: Path) -> Path:
    """It takes 12 s less. Bits depend on optimisation only where multiplications and additions can be fused."""
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -O1\n')
    compiler.chmod(0o700)
    return compiler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lesser_processor_attends_alike(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    for num_heads, num_kv_heads, head_dim, window in [(4, 2, 64, None), (5, 1, 40, 50), (3, 3, 96, 64)]:
        layout = KVLayout.dense(num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16, dtype=name)
        storage, inputs = filled(layout, ROWS)
        q_TND = normal(inputs.query_starts[-1], num_heads, head_dim, dtype=dtype, seed=7)
        outputs = []
        for backend in (NativeAttention(storage, Native(library, name)), TorchAttention(storage)):
            backend.begin(inputs)
            outputs.append(backend.attend(0, q_TND, AttentionOptions(scale=head_dim**-0.5, window=window)))
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(*outputs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_lesser_processor_reads_8_bit_kv_alike(library: ctypes.CDLL, kv_dtype: KVDtype) -> None:
    """Head sizes that fill the vectors, and one that does not."""
    for num_heads, num_kv_heads, head_dim, window in [(4, 2, 64, None), (5, 1, 40, 50), (3, 3, 96, 64)]:
        layout = KVLayout.dense(
            num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16, dtype="float32"
        )
        storage, inputs = filled(with_kv_dtype(layout, kv_dtype), ROWS)
        q_TND = normal(inputs.query_starts[-1], num_heads, head_dim, dtype=torch.float32, seed=7) / 16
        outputs = []
        for backend in (NativeAttention(storage, Native(library, "float32")), TorchAttention(storage)):
            backend.begin(inputs)
            outputs.append(backend.attend(0, q_TND, AttentionOptions(scale=head_dim**-0.5, window=window)))
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lesser_processor_norms_alike(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    kernels = Native(library, str(dtype).removeprefix("torch."))
    x, residual = (normal(5, 344, dtype=dtype, seed=seed) for seed in (1, 2))
    weight, normed, stream = normal(344, dtype=dtype, seed=3), torch.empty_like(x), torch.empty_like(x)
    pointers = [tensor.data_ptr() for tensor in (x, residual, weight, normed, stream)]
    kernels.add_norm(*pointers[:3], None, *pointers[3:], 5, 344, 344, 1e-5, 0, 1)
    expected_normed, expected_stream = twins.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(stream, expected_stream)
    torch.testing.assert_close(normed, expected_normed, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lesser_processor_multiplies_alike(
    library: ctypes.CDLL, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a row has the same bits in every batch."""
    kernels = Native(library, str(dtype).removeprefix("torch."))
    monkeypatch.setattr("workers.kernels.cpu.products.native", lambda _: kernels)
    monkeypatch.setattr("workers.kernels.cpu.products.native_tiles", lambda: None)
    x, weight = normal(70, 300, dtype=dtype, seed=1), normal(100, 300, dtype=dtype, seed=2)
    product = PackedFloats(weight)
    together = product(x)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(together.double(), x.double() @ weight.double().T, rtol=tolerance, atol=1e-3)
    for num_rows in (1, 2, 3, 5, 6, 7, 13, 16, 33):
        assert torch.equal(product(x[:num_rows]), together[:num_rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["grouped 4 128", "grouped 3 32", "zeros 8 128", "minimum 5 32", "factors 6 16"])
def test_a_lesser_processor_multiplies_quantised_weights_alike(
    library: ctypes.CDLL, form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of integers are exact, and float32 is rounded more often without fused multiplications."""
    weight = of_form(form, 33, 320)
    x = normal(9, 320, dtype=dtype, seed=1)
    expected = PackedQuantised(weight, dtype)(x)
    kernels = Native(library, str(dtype).removeprefix("torch."))
    monkeypatch.setattr("workers.kernels.cpu.quantised.native", lambda _: kernels)
    product = PackedQuantised(weight, dtype)
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(product(x), expected, rtol=tolerance, atol=1e-4)
    for num_rows in (1, 2, 3, 4):
        assert torch.equal(product(x[:num_rows]), product(x)[:num_rows])


@pytest.mark.parametrize("table", [NF4, IQ4, E4M3], ids=["nf4", "iq4", "fp8"])
def test_a_lesser_processor_looks_levels_up_alike(
    library: ctypes.CDLL, table: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = 8 if len(table) == 256 else 4
    weight = grouped(bits, 64, 33, 320, table=table, zero=0)
    if bits == 8:  # without its two NaNs
        weight = replace(weight, codes_OW=weight.codes_OW & 0x7E)
    x = normal(5, 320, dtype=torch.bfloat16, seed=1)
    expected = PackedQuantised(weight, x.dtype)(x)
    monkeypatch.setattr("workers.kernels.cpu.quantised.native", lambda _: Native(library, "bfloat16"))
    torch.testing.assert_close(PackedQuantised(weight, x.dtype)(x), expected, rtol=2**-7, atol=1e-4)


def test_without_tiles_the_library_says_so(library: ctypes.CDLL) -> None:
    assert library.has_tiles() == 0


@pytest.mark.skipif(native_tiles() is None, reason="no AMX here")
def test_tiles_attend_where_there_are_any_and_the_head_fits_them() -> None:
    def kernels_for(head_dim: int, dtype: str) -> object:
        layout = KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=head_dim, block_size=4, dtype=dtype)
        storage, _ = filled(layout, ((1, 3),))
        backend = cpu_attention(storage)
        assert isinstance(backend, NativeAttention)
        return backend.kernels_for(getattr(torch, dtype))

    assert isinstance(kernels_for(64, "bfloat16"), Tiles)
    assert isinstance(kernels_for(40, "bfloat16"), Native)
    assert isinstance(kernels_for(64, "float32"), Native)


@pytest.mark.skipif(native_tiles() is None, reason="no AMX here")
@pytest.mark.parametrize("window", [None, 1, 50, 64, 100])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 64), (3, 3, 96), (40, 2, 32), (6, 1, 128)])
def test_tiles_attend_as_float64_does(num_heads: int, num_kv_heads: int, head_dim: int, window: int | None) -> None:
    """Full and partial blocks of sixteen queries, one head and several, pages of any size."""
    for block_size in (5, 16):
        layout = KVLayout.dense(
            num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype="bfloat16"
        )
        storage, inputs = filled(layout, (*ROWS, (300, 0)))
        q_TND = normal(inputs.query_starts[-1], num_heads, head_dim, dtype=torch.bfloat16, seed=7) * 3
        backend = cpu_attention(storage)
        backend.begin(inputs)
        actual = backend.attend(0, q_TND, AttentionOptions(scale=head_dim**-0.5, window=window))
        expected = exactly(storage.data[0].double(), inputs, q_TND.double(), head_dim**-0.5, window)
        torch.testing.assert_close(actual.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(native_tiles() is None, reason="no AMX here")
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 12, 16])
def test_a_token_that_decodes_sees_nothing_beside_its_window(group: int) -> None:
    shapes = ((16, 64, None), (32, 96, 33), (16, 32, 64), (48, 128, 5), (16, 160, 1), (64, 256, 17))
    for block_size, head_dim, window in shapes:
        layout = KVLayout.dense(
            num_layers=1, num_kv_heads=2, head_dim=head_dim, block_size=block_size, dtype="bfloat16"
        )
        storage, inputs = filled(layout, tuple((1, cached) for cached in (0, 15, 16, 63, 64, 200)))
        q_TND = normal(6, 2 * group, head_dim, dtype=torch.bfloat16, seed=7)
        expected = exactly(storage.data[0].double(), inputs, q_TND.double(), head_dim**-0.5, window)
        for row, context_len in enumerate(inputs.context_lens):
            for position in range(max(0, context_len - (window or context_len))):
                page = inputs.tables[0].block_tables_SB[row, position // block_size]
                storage.data[0][:, page, :, position % block_size] = float("nan")
        backend = cpu_attention(storage)
        backend.begin(inputs)
        actual = backend.attend(0, q_TND, AttentionOptions(scale=head_dim**-0.5, window=window))
        torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=1e-2)


def exactly(
    kv_2BKSD: torch.Tensor, inputs: AttentionInputs, q_TND: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Token by token, in the dtype it is given."""
    out_TND = torch.empty_like(q_TND)
    num_kv_heads, block_size = kv_2BKSD.shape[2:4]
    for row, context_len in enumerate(inputs.context_lens):
        first, last = inputs.query_starts[row], inputs.query_starts[row + 1]
        table_B = inputs.tables[0].block_tables_SB[row, : -(-context_len // block_size)].long()
        k_KCD, v_KCD = kv_2BKSD[:, table_B].transpose(1, 2).reshape(2, num_kv_heads, -1, q_TND.shape[2])
        for token in range(first, last):
            stop = context_len - (last - 1 - token)
            start = 0 if window is None else max(0, stop - window)
            q_KGD = q_TND[token].view(num_kv_heads, -1, q_TND.shape[2])
            weights_KGC = (q_KGD @ k_KCD[:, start:stop].transpose(1, 2) * scale).softmax(dim=-1)
            out_TND[token] = (weights_KGC @ v_KCD[:, start:stop]).flatten(0, 1)
    return out_TND
