"""Keys and values in 8 bits: the answers of transformers with a cache that rounds alike, and the same bits on each way
that a block can come to be in a cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from cluster.config.settings import make_config
from cluster.supervision.preflight import check_feasible
from kvtransfer.hashing import chain_hashes
from protos.errors import BadCheckpoint, Misconfigured, UnsupportedModel
from protos.values import SamplingParams
from tests.numerics.conftest import Checkpoint, assert_close, random_tokens
from tests.numerics.engines import answer, colocated
from tests.numerics.moving import moved, pulled, two
from tests.numerics.paged import PagedRun, in_chunks
from workers.build_rank import open_rank
from workers.models.loader import load_model
from workers.parallel.group import Solo
from workers.weights.kv_scales import read_kv_scales
from workers.worker_config import KVDtype, WorkerConfig

FEW = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
KINDS: tuple[KVDtype, ...] = ("int8", "fp8")


class RoundingCache(DynamicCache):
    """Rounds each token's keys and values when they are written, as the formats are defined, and keeps what they stand
    for."""

    def __init__(self, kv_dtype: KVDtype) -> None:
        super().__init__()
        self.kv_dtype = kv_dtype

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(self.rounded(key_states), self.rounded(value_states), layer_idx, *args, **kwargs)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        if self.kv_dtype == "fp8":
            return x.to(torch.float8_e4m3fn).to(x.dtype)
        steps = x.abs().amax(-1, keepdim=True) / 127
        return (x / steps).round() * steps


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("kv_dtype", KINDS)
@torch.no_grad()
def test_logits_equal_transformers_with_a_rounding_cache(
    checkpoint: Checkpoint, family: str, kv_dtype: KVDtype
) -> None:
    folder, oracle = checkpoint(family)
    tokens = random_tokens(60)
    expected = oracle(torch.tensor([tokens]), past_key_values=RoundingCache(kv_dtype)).logits[0]
    plain = oracle(torch.tensor([tokens])).logits[0]
    run = PagedRun(load_model(folder), kv_dtype=kv_dtype, fused=True)
    logits = in_chunks(run, tokens, (17, 30), prompt_len=60)
    assert_close(logits, expected)
    assert (logits - plain).abs().max() > 1e-3 * plain.abs().max(), "nothing was rounded"


PROMPT = random_tokens(100, 5)
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
Bits = list[tuple[int, Any]]


def bits(answered: Any) -> Bits:
    """Tokens with their logprobs."""
    return [pair for update in answered.updates for pair in zip(update.token_ids, update.logprobs, strict=True)]


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Checkpoint) -> dict[KVDtype, Bits]:
    folder, _ = checkpoint("qwen3")
    by_dtype: dict[KVDtype, Bits] = {}
    for kv_dtype in (*KINDS, "auto"):
        with colocated(WorkerConfig(model=str(folder), kv_dtype=kv_dtype, num_blocks=40)) as engine:
            by_dtype[kv_dtype] = bits(answer(engine, [PROMPT], LOGPROBS)[0])
    assert by_dtype["int8"] != by_dtype["auto"] != by_dtype["fp8"]
    return by_dtype


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_a_cached_prefix_has_the_bits_of_a_computed_one(
    checkpoint: Checkpoint, undisturbed: dict[KVDtype, Bits], kv_dtype: KVDtype
) -> None:
    folder, _ = checkpoint("qwen3")
    config = WorkerConfig(
        model=str(folder), kv_dtype=kv_dtype, num_blocks=10, max_model_len=160, host_kv_gib=0.01, prefill_chunk=32
    )
    with colocated(config) as engine:
        first, again = (answer(engine, [PROMPT], LOGPROBS)[0] for _ in range(2))
        assert again.num_cached_tokens == 96
        for seed in (7, 8):
            answer(engine, [random_tokens(150, seed)], FEW)
        assert engine.pool.match(chain_hashes(PROMPT, config.block_size)) == []
        loaded = answer(engine, [PROMPT], LOGPROBS)[0]
        assert loaded.num_cached_tokens == 96
    assert bits(first) == bits(again) == bits(loaded) == undisturbed[kv_dtype]


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_preempted_sequences_continue_with_the_same_bits(
    checkpoint: Checkpoint, undisturbed: dict[KVDtype, Bits], kv_dtype: KVDtype
) -> None:
    folder, _ = checkpoint("qwen3")
    with colocated(WorkerConfig(model=str(folder), kv_dtype=kv_dtype, num_blocks=14, max_model_len=160)) as engine:
        answers = answer(engine, [random_tokens(90, 3), PROMPT], LOGPROBS)
        assert engine.scheduler.num_preemptions > 0
    assert bits(answers[1]) == undisturbed[kv_dtype]


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_moved_sequences_and_pulled_prefixes_keep_their_bits(
    checkpoint: Checkpoint, undisturbed: dict[KVDtype, Bits], kv_dtype: KVDtype
) -> None:
    folder, _ = checkpoint("qwen3")
    tokens = [token for token, _ in undisturbed[kv_dtype]]
    config = WorkerConfig(model=str(folder), kv_dtype=kv_dtype, num_blocks=40, device="cpu")
    with two(config) as (old, new):
        assert moved(old, new, PROMPT, LOGPROBS, num_before=15) == tokens
    with two(config) as (old, new):
        assert pulled(old, new, PROMPT, LOGPROBS) == (tokens, 96)


def test_a_block_in_8_bits_is_about_half_as_large(checkpoint: Checkpoint) -> None:
    """At head size 128, and so are the blocks that a worker counts, gives back and shows."""
    folder, _ = checkpoint("qwen3", head_dim=128)
    sizes: dict[str, tuple[int, int]] = {}
    for kv_dtype in (*KINDS, "auto"):
        config = WorkerConfig(
            model=str(folder),
            device="cpu",
            dtype="bfloat16",
            kv_dtype=kv_dtype,
            memory_fraction=1e-3,
            max_num_seqs=2**11,
        )
        rank = open_rank(config, Solo())
        assert rank.storage.block_bytes == rank.layout.block_bytes
        sizes[kv_dtype] = rank.layout.block_bytes, rank.storage.num_blocks
    plain_bytes, plain_blocks = sizes["auto"]
    for kv_dtype in KINDS:
        num_bytes, num_blocks = sizes[kv_dtype]
        assert num_bytes <= 0.52 * plain_bytes
        assert num_blocks >= 1.9 * plain_blocks


def with_scales(folder: Path, into: Path, scales: dict[str, Any], scheme: dict[str, Any] | None = None) -> Path:
    """A copy of a checkpoint with more tensors, and a kv_cache_scheme."""
    shutil.copytree(folder, into)
    weights = load_file(into / "model.safetensors")
    save_file(weights | {name: torch.tensor(scale) for name, scale in scales.items()}, into / "model.safetensors")
    if scheme is not None:
        config = json.loads((into / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
        (into / "config.json").write_text(json.dumps(config))
    return into


NAMES = ("self_attn.k_scale", "self_attn.v_scale"), ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"), (
    "self_attn.attn.k_scale", "self_attn.attn.v_scale"), ("self_attn.kv_scale",)  # fmt: skip


@pytest.mark.parametrize("names", NAMES)
def test_fp8_divides_by_the_scales_of_the_checkpoint(
    checkpoint: Checkpoint, tmp_path: Path, names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = checkpoint("llama")
    stored = {f"model.layers.{layer}.{name}": 0.25 + layer for layer in range(2) for name in names}
    into = with_scales(folder, tmp_path / "scaled", stored)
    rank = open_rank(WorkerConfig(model=str(into), kv_dtype="fp8", num_blocks=20), Solo())
    for layer in range(2):
        scales = rank.storage.scales(layer)
        assert scales is not None
        assert [part.tolist() for part in scales] == [[0.25 + layer] * 2] * 2
    assert not [record for record in caplog.records if "scale" in record.getMessage()]


def test_each_rank_takes_the_scales_of_its_heads(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, _ = checkpoint("llama")
    per_head = {f"model.layers.0.self_attn.{name}_scale": [0.5, 2.0] for name in "kv"}
    into = with_scales(folder, tmp_path / "scaled", per_head)
    scales = read_kv_scales(into, num_layers=2, num_kv_heads=2, heads=range(1, 2))
    assert {layer: [part.tolist() for part in parts] for layer, parts in scales.items()} == {0: [[2.0], [2.0]]}


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        ({"k_scale": 0.0, "v_scale": 1.0}, "self_attn.k_scale"),
        ({"k_scale": 1e-40, "v_scale": 1.0}, "self_attn.k_scale"),
        ({"k_scale": [1.0, 1.0, 1.0], "v_scale": 1.0}, "has 3 numbers"),
        ({"k_scale": 1.0}, "layer 1 has a scale for its keys only"),
    ],
)
def test_scales_that_cannot_be_are_refused(
    checkpoint: Checkpoint, tmp_path: Path, scales: dict[str, Any], reason: str
) -> None:
    folder, _ = checkpoint("llama")
    stored = {f"model.layers.1.self_attn.{name}": scale for name, scale in scales.items()}
    with pytest.raises(BadCheckpoint, match=reason):
        open_rank(
            WorkerConfig(model=str(with_scales(folder, tmp_path / "bad", stored)), kv_dtype="fp8", num_blocks=20),
            Solo(),
        )


def test_integer_scales_are_not_read_as_fp8_scales(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, _ = checkpoint("llama")
    into = with_scales(folder, tmp_path / "int8", {}, {"type": "int", "num_bits": 8})
    with pytest.raises(UnsupportedModel, match="'int' in 8 bits"):
        read_kv_scales(into, num_layers=2, num_kv_heads=2, heads=range(2))


def test_fp8_is_refused_for_keys_with_a_bias(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint("qwen2")
    with pytest.raises(Misconfigured, match="kv_dtype is fp8"):
        check_feasible(make_config({"model": str(folder), "worker": {"kv_dtype": "fp8"}}))
    open_rank(WorkerConfig(model=str(folder), kv_dtype="int8", num_blocks=20), Solo())
