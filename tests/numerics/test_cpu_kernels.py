"""The compiled CPU kernels against their twins in torch: equal to the bit where only one rounding is possible."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from protos.values import KVLayout
from tests.numerics.filled import ROWS, filled, normal
from workers.attention.backend import AttentionInputs, AttentionOptions, GroupTables
from workers.attention.cpu import NativeAttention, cpu_attention
from workers.attention.torch_attention import TorchAttention
from workers.kernels import cpu, twins
from workers.kernels.cpu import native_build
from workers.kernels.cpu.native_build import compile_library, native
from workers.kv.kv_storage import KVStorage

DTYPES = [torch.float32, torch.bfloat16]

needs_compiler = pytest.mark.skipif(native(torch.float32) is None, reason="no C++ compiler here: torch is used")


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Allows one unit in the last place, for the order of a sum."""
    assert found.dtype == expected.dtype
    tolerance = 1e-2 if found.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 24), (3, 256), (130, 344)])
def test_norms_and_gate(dtype: torch.dtype, num_tokens: int, size: int) -> None:
    x, residual = (normal(num_tokens, size, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = normal(size, dtype=dtype, seed=3)
    assert_close(cpu.rms_norm(x, weight, 1e-5), twins.rms_norm(x, weight, 1e-5))
    normed, stream = cpu.add_rms_norm(x, residual, weight, 1e-5)
    expected_normed, expected_stream = twins.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(stream, expected_stream)
    assert_close(normed, expected_normed)
    gate_up = normal(num_tokens, 2 * size, dtype=dtype, seed=4) * 20
    assert_close(cpu.silu_mul(gate_up), twins.silu_mul(gate_up))
    assert_close(cpu.gelu_tanh_mul(gate_up / 8), twins.gelu_tanh_mul(gate_up / 8))
    for name in ("silu", "gelu", "gelu_tanh", "relu2"):
        assert_close(cpu.activate(gate_up[:, :size] / 8, name), twins.activate(gate_up[:, :size] / 8, name))
    wide, bias = weight.float() + 1 / 300, residual[0].float()
    assert_close(cpu.rms_norm(x, wide, 1e-5), twins.rms_norm(x, wide, 1e-5))
    assert_close(cpu.layer_norm(x, wide, bias, 1e-5), twins.layer_norm(x, wide, bias, 1e-5))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_a_wider_tensor_are_normed_in_place(dtype: torch.dtype) -> None:
    qkv = normal(9, (4 + 2 + 2) * 16, dtype=dtype)
    q, k, v = (part.view(9, -1, 16) for part in torch.split(qkv, [64, 32, 32], dim=1))
    weight = normal(16, dtype=dtype, seed=1)
    assert_close(cpu.rms_norm(k, weight, 1e-5), twins.rms_norm(k, weight, 1e-5))
    angles = torch.rand(9, 8, generator=torch.Generator().manual_seed(2)) * 6
    slots = torch.tensor([17, 3, 0, 8, 9, 40, 41, 30, 2])
    mine, theirs = (torch.zeros(2, 6, 2, 7, 16, dtype=dtype) for _ in range(2))
    rotated = cpu.rope_kv_write(q, k, v, angles.cos(), angles.sin(), mine[0], mine[1], slots)
    expected = twins.rope_kv_write(q, k, v, angles.cos(), angles.sin(), theirs[0], theirs[1], slots)
    assert torch.equal(rotated, expected)
    assert torch.equal(mine, theirs)


@needs_compiler
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), 1e38, -1e38, 1e-40, -200.0, 200.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_beyond_all_bounds(dtype: torch.dtype, special: float) -> None:
    gate_up = torch.ones(1, 64, dtype=dtype)
    gate_up[0, 5] = special
    for gated in ("silu_mul", "gelu_tanh_mul"):
        actual, expected = getattr(cpu, gated)(gate_up), getattr(twins, gated)(gate_up)
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-30, equal_nan=True)


@needs_compiler
def test_unsupported_kernels_fall_back_to_torch() -> None:
    half = normal(3, 8, dtype=torch.float16)
    assert torch.equal(cpu.silu_mul(half), twins.silu_mul(half))
    strided = normal(3, 32, dtype=torch.float32)[:, ::2]
    assert torch.equal(cpu.silu_mul(strided), twins.silu_mul(strided))
    assert torch.equal(cpu.rms_norm(strided, torch.ones(16), 1e-5), twins.rms_norm(strided, torch.ones(16), 1e-5))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 50, 64, 100])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (3, 3, 96), (8, 1, 32), (5, 1, 40)])
def test_attention_over_more_keys_than_one_look_takes(
    dtype: torch.dtype, window: int | None, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Head sizes and tiles that are full and not full, on all threads."""
    name = str(dtype).removeprefix("torch.")
    layout = KVLayout.dense(num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16, dtype=name)
    storage, inputs = filled(layout, ROWS)
    q_TND = normal(inputs.query_starts[-1], num_heads, head_dim, dtype=dtype, seed=7)
    outputs = []
    for make in (cpu_attention, TorchAttention):
        backend = make(storage)
        backend.begin(inputs)
        outputs.append(backend.attend(0, q_TND, AttentionOptions(scale=head_dim**-0.5, window=window)))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert not outputs[0].isnan().any()
    torch.testing.assert_close(outputs[0], outputs[1], rtol=tolerance, atol=tolerance)


@needs_compiler
def test_attention_of_a_row_does_not_depend_on_the_batch() -> None:
    layout = KVLayout.dense(num_layers=1, num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
    storage, together = filled(layout, ROWS)
    q_TND = normal(together.query_starts[-1], 4, 64, dtype=torch.bfloat16)
    backend = cpu_attention(storage)
    backend.begin(together)
    expected_TND = backend.attend(0, q_TND, AttentionOptions(scale=0.125, window=None))
    for row, (start, stop) in enumerate(zip(together.query_starts, together.query_starts[1:], strict=False)):
        backend.begin(
            AttentionInputs(
                positions_T=together.positions_T[start:stop],
                query_starts=(0, stop - start),
                context_lens=together.context_lens[row : row + 1],
                tables=(
                    GroupTables(
                        slots_T=together.tables[0].slots_T[start:stop],
                        block_tables_SB=together.tables[0].block_tables_SB[row : row + 1],
                    ),
                ),
                max_query=stop - start,
                max_context=together.context_lens[row],
            )
        )
        found_TND = backend.attend(0, q_TND[start:stop], AttentionOptions(scale=0.125, window=None))
        assert torch.equal(found_TND, expected_TND[start:stop])


@needs_compiler
def test_the_library_is_compiled_once_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_SOURCES", {"elementwise.cpp": ""})
    first = compile_library(tmp_path / "cache")
    assert list((tmp_path / "cache").glob("[!.]*")) == [first]
    monkeypatch.setattr(native_build, "run", None)
    assert compile_library(tmp_path / "cache") == first


def test_a_slow_compilation_is_logged_with_a_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def never_ends(*command: str, timeout_s: float) -> None:
        raise subprocess.TimeoutExpired(command, timeout_s)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", sys.executable)  # answers --version
    monkeypatch.setattr(native_build, "run", never_ends)
    with caplog.at_level(logging.WARNING):
        assert native_build._library.__wrapped__() is None
    assert "did not finish in 120 s" in caplog.text
    assert "python -m workers.kernels.cpu" in caplog.text


def test_without_a_compiler_torch_computes_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_build._library.cache_clear()
    monkeypatch.setattr("workers.attention.cpu.native", native.__wrapped__)
    layout = KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    with caplog.at_level(logging.WARNING):
        backend = cpu_attention(KVStorage(layout, num_blocks=1))
    native_build._library.cache_clear()
    assert isinstance(backend, TorchAttention)
    assert "no-such-compiler" in caplog.text


@needs_compiler
def test_the_compiled_backend_is_the_cpu_s() -> None:
    layout = KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="bfloat16")
    storage = KVStorage(layout, num_blocks=1)
    assert isinstance(cpu_attention(storage), NativeAttention)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_keys_and_values_are_rounded_like_the_twins(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Bit for bit: small numbers and zeros, ties, and e4m3's smallest and largest ones among them."""
    num_tokens, num_kv_heads, head_dim = 40, 3, 48
    x = normal(3, num_tokens, num_kv_heads, head_dim, dtype=torch.float32) * torch.logspace(
        -12, 12, num_tokens, 2.0
    ).view(1, -1, 1, 1)
    x[:, 3] = 0
    x[:, 4] = torch.arange(head_dim) * 0.5
    x[:, 5, 0, 7], x[:, 6, 1, 8], x[:, 7, 2, 9] = float("nan"), float("inf"), -float("inf")
    q, k, v = x.to(dtype)
    angles = torch.zeros(num_tokens, head_dim // 2)
    slots, outputs = torch.randperm(64)[:num_tokens], []
    for write in (cpu.rope_kv_write, twins.rope_kv_write):
        caches = [torch.zeros(8, num_kv_heads, 8, head_dim, dtype=torch.uint8).view(kv_dtype) for _ in range(2)]
        of_tokens = [torch.zeros(8, num_kv_heads, 8) for _ in range(2)]
        of_heads = [torch.tensor([0.5, 1.0, 0.3]) for _ in range(2)]
        scales = of_tokens if kv_dtype == torch.int8 else of_heads
        write(q, k, v, angles.cos(), angles.sin(), caches[0], caches[1], slots, (scales[0], scales[1]))
        outputs.append((*(cache.view(torch.uint8) for cache in caches), *scales))
    for actual, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert outputs[0][0].any()
