"""LoRA adapters against models into which PEFT merged them, and that rows of a step do not change one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import BadCheckpoint
from tests.numerics.adapters import ALL_LINEAR, ATTENTION, make_adapter, merged_model
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.conftest import assert_close, random_tokens
from tests.numerics.paged import PagedRun
from workers.adapters.adapter_files import WEIGHTS
from workers.adapters.linear import AdapterTable
from workers.adapters.low_rank import AdapterTokens
from workers.models.decoder import Decoder
from workers.models.loader import load_model

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "rank-stabilised": ("llama", {"attention_bias": True, "mlp_bias": True}, {"use_rslora": True}),
    "ranks-by-module": (
        "llama",
        {},
        {
            "rank_pattern": {"q_proj": 2, "layers.0.mlp.up_proj": 7, r"layers\.1\.self_attn\.(k|v)_proj": 5},
            "alpha_pattern": {"q_proj": 9, "down_proj": 3.5, "gate_proj$": 1},
        },
    ),
    "ranks-by-module-and-stabilised": (
        "llama",
        {},
        {"rank_pattern": {"o_proj": 9}, "alpha_pattern": {"o_proj": 5}, "use_rslora": True},
    ),
    "one-layer": ("llama", {}, {"layers_to_transform": [1]}),
    "all-linear": ("qwen3", {}, {"targets": "all-linear"}),
    "by-expression": ("llama", {}, {"targets": r".*layers\.0\.(self_attn\.q_proj|mlp\.down_proj)"}),
    "attention-only": ("qwen3", {}, {"targets": ATTENTION}),
    "fused-projections": ("phi3", {"head_dim": 16}, {"targets": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}),
    "gelu-and-norms": ("gemma2", {"head_dim": 32}, {}),
    "interleaved-rope": ("glm4", {}, {"targets": (*ATTENTION, "gate_up_proj", "down_proj")}),
    "experts": ("mixtral", {}, {"targets": ATTENTION}),
    "latent-attention": (
        "deepseek_v2",
        {"q_lora_rank": 20},
        {"targets": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")},
    ),
}


def table(decoder: Decoder) -> AdapterTable:
    return AdapterTable(decoder, max_adapters=4)


def load(adapters: AdapterTable, path: Path) -> str:
    return adapters.load_adapter(str(path), adapters.check(str(path)).adapter_id).adapter_id


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_equal_those_of_merged_weights(tmp_path: Path, case: str) -> None:
    family, overrides, options = FAMILIES[case]
    model = make_checkpoint(family, tmp_path / "model", **overrides)
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter", **options)
    decoder = load_model(tmp_path / "model")
    decoder.pack()
    adapter_id = load(table(decoder), adapter)
    tokens = random_tokens(40)
    with torch.no_grad():
        base = model(torch.tensor([tokens])).logits[0]
        merged = merged_model(model, adapter)(torch.tensor([tokens])).logits[0]
    assert (merged - base).abs().max() > 0.1, "the adapter changes nothing"
    run = PagedRun(decoder, fused=True)
    cuts = (slice(0, 30), slice(30, 39), slice(39, 40))
    chunks = [run.step([("a", tokens[cut], 40)], [adapter_id])[0] for cut in cuts]
    assert_close(torch.cat(chunks), merged)
    assert_close(run.step([("base", tokens, 40)])[0], base)


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", "off"), ("bfloat16", "off"), ("bfloat16", "int4")])
def test_a_rows_bits_do_not_depend_on_its_batch(tmp_path: Path, dtype: str, quantize: Any) -> None:
    """Rows of two adapters and of none, together and alone; rows without one as compiled layers compute them."""
    make_checkpoint("llama", tmp_path / "model", hidden_size=128, intermediate_size=264)
    decoder = load_model(tmp_path / "model", dtype=dtype, quantize=quantize)
    decoder.pack()
    adapters = table(decoder)
    paths = [make_adapter(tmp_path / "model", tmp_path / str(rank), seed=rank, rank=rank) for rank in (4, 40)]
    first, two = (load(adapters, path) for path in paths)
    used = {"base": "", "a": first, "b": two, "c": first}
    steps = [{name: random_tokens(17 + 4 * seed, seed) for seed, name in enumerate(used)}]
    steps += [{name: random_tokens(1, 10 + number + seed) for seed, name in enumerate(used)} for number in range(2)]
    together, alone = PagedRun(decoder, fused=True), {name: PagedRun(decoder, fused=True) for name in used}
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in used}
    for tokens in steps:
        batched = together.step([(name, tokens[name], len(steps[0][name])) for name in used], list(used.values()))
        for name, row in zip(used, batched, strict=True):
            [by_itself] = alone[name].step([(name, tokens[name], len(steps[0][name]))], [used[name]])
            assert torch.equal(row, by_itself), f"row {name} has other bits in a batch"
            logits[name].append(row)
    same_prompt = PagedRun(decoder).step([("x", steps[0]["a"], 1)])[0]
    assert not torch.equal(same_prompt, logits["a"][0])


@pytest.mark.parametrize("quantize", ["off", "int8", "int4", "fp8"])
@pytest.mark.parametrize("family", ["llama", "starcoder2"])
def test_quantised_layers_add_the_adapters_updates(tmp_path: Path, family: str, quantize: Any) -> None:
    targets = ALL_LINEAR if family == "llama" else (*ATTENTION, "c_fc", "c_proj")
    make_checkpoint(family, tmp_path / "model", hidden_size=128)
    decoder = load_model(tmp_path / "model", quantize=quantize)
    weights = [linear._weight.dequantised().double() for linear in decoder.linears()]  # type: ignore[attr-defined]
    decoder.pack()
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter", targets=targets)
    adapter_id = load(table(decoder), adapter)
    deltas = load_file(adapter / "adapter_model.safetensors")
    for linear, weight in zip(decoder.linears(), weights, strict=True):
        x = torch.randn(5, linear.share.num_inputs, generator=torch.Generator().manual_seed(1))
        halves = [
            [deltas[f"base_model.model.{part.name}.lora_{half}.weight"].double() for half in "BA"]
            for part in linear.share.projections
        ]
        delta = torch.cat([up @ down for up, down in halves]) * 2
        bias = getattr(linear, "bias_O", None)
        places = torch.tensor([1, 3])
        expected = x.double() @ weight.T + (0 if bias is None else bias.double())
        expected[places] += x.double()[places] @ delta.T
        if family == "llama" and len(halves) == 2:
            gate, up = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * up
        decoder.step_adapters.tokens = [AdapterTokens(adapter_id=adapter_id, places_T=places)]
        torch.testing.assert_close(linear(x).double(), expected, rtol=1e-4, atol=1e-4)  # type: ignore[operator]


def test_an_adapter_is_loaded_once_and_gone_when_unloaded(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "model")
    decoder = load_model(tmp_path / "model")
    adapters, path = table(decoder), make_adapter(tmp_path / "model", tmp_path / "adapter")
    first, second = load(adapters, path), load(adapters, path)
    assert list(adapters.loaded) == [first] == [second]
    before = PagedRun(decoder).step([("x", [5, 6, 7], 3)], [first])[0]
    adapters.unload_adapter(first)
    assert not adapters.loaded
    after = PagedRun(decoder).step([("x", [5, 6, 7], 3)], [first])[0]
    assert not torch.equal(before, after)


@pytest.mark.parametrize("broken", ["nan", "alpha"])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, broken: str) -> None:
    make_checkpoint("llama", tmp_path / "model")
    path = make_adapter(tmp_path / "model", tmp_path / "adapter", lora_alpha=1e308 if broken == "alpha" else 8)
    if broken == "nan":
        tensors = load_file(path / WEIGHTS)
        next(iter(tensors.values()))[0, 0] = float("nan")
        save_file(tensors, path / WEIGHTS)
    adapters = table(load_model(tmp_path / "model"))
    with pytest.raises(BadCheckpoint, match="not finite"):
        adapters.check(str(path))
