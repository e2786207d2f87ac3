"""Decoders whose layers transformers computes, in Baton's engine, against transformers by itself."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import BadCheckpoint, Misconfigured, UnsupportedModel
from protos.values import SamplingParams
from tests.numerics.conftest import Checkpoint, assert_close, random_tokens
from tests.numerics.engines import answer, colocated, oracle_answers
from tests.numerics.moving import moved, pulled, two
from tests.numerics.paged import PagedRun, in_chunks
from tests.numerics.test_tensor_parallel import on_ranks
from workers.models.model_config import weight_bytes
from workers.models.served import check_ranks, read_served
from workers.models.transformers.transformers_loader import load_transformers
from workers.parallel.group import TensorParallel
from workers.worker_config import WorkerConfig

MODELS = {
    "gpt_neox": "fused projections, layer norms",
    "opt": "learned positions",
    "ministral": "a window in one layer",
    "olmoe": "experts, one tensor each",
    "granitemoe_swa": "experts in one tensor",
    "diffllama": "parameters of its attention, two calls a layer",
    "minicpm3": "keys longer than values, longrope",
}


@pytest.mark.parametrize("family", MODELS)
@torch.no_grad()
def test_chunks_and_packed_rows_have_the_oracles_logits(checkpoint: Checkpoint, family: str) -> None:
    folder, oracle = checkpoint(family)
    tokens = random_tokens(53, seed=1)
    expected = oracle(torch.tensor([tokens])).logits[0]
    model = load_transformers(folder)
    model.pack()
    assert_close(in_chunks(PagedRun(model), tokens, [16, 1, 24, 5], prompt_len=46), expected)
    first, second = PagedRun(model).step([("a", tokens[:20], 20), ("b", tokens, 53)])
    assert_close(first, oracle(torch.tensor([tokens[:20]])).logits[0])  # short, where a rope has other frequencies
    assert_close(second, expected)


@pytest.mark.parametrize(("family", "tp"), [("nemotron", 2), ("ministral", 2), ("olmoe", 2)])
@torch.no_grad()
def test_ranks_share_a_model_by_transformers_own_plan(checkpoint: Checkpoint, family: str, tp: int) -> None:
    folder, oracle = checkpoint(family)
    tokens = random_tokens(41)

    def program(group: TensorParallel) -> torch.Tensor:
        return in_chunks(PagedRun(load_transformers(folder, parallel=group)), tokens, [24, 14], prompt_len=38)

    for logits in on_ranks(tp, program):
        assert_close(logits, oracle(torch.tensor([tokens])).logits[0])


FEW = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def test_the_engine_serves_the_oracles_greedy_tokens(checkpoint: Checkpoint) -> None:
    """Cold, warm, preempted, moved to another worker and with a prefix of one."""
    folder, oracle = checkpoint("ministral")
    prompts = [random_tokens(length, seed=length) for length in (40, 42, 70)]
    expected = oracle_answers(oracle, prompts, 16)
    config = WorkerConfig(model=str(folder), num_blocks=64, max_model_len=100, prefill_chunk=16, device="cpu")
    with colocated(config) as engine:
        assert [output.token_ids for output in answer(engine, prompts, FEW)] == expected
        warm = answer(engine, prompts, FEW)
        assert [output.token_ids for output in warm] == expected
        assert [output.num_cached_tokens for output in warm] == [32, 32, 64]
    with colocated(replace(config, num_blocks=7, free_windows=False)) as scarce:
        assert [output.token_ids for output in answer(scarce, prompts, FEW)] == expected
        assert scarce.scheduler.num_preemptions > 0
    keeps = replace(config, free_windows=False)
    with two(keeps) as (old, new):
        assert moved(old, new, prompts[2], FEW, num_before=9) == expected[2]
    with two(keeps) as (old, new):
        assert pulled(old, new, prompts[2], FEW) == (expected[2], 64)


def test_the_cache_is_known_from_the_config(checkpoint: Checkpoint) -> None:
    """Windows by layer, and heads as wide as the longer of keys and values."""
    windowed = read_served(checkpoint("ministral")[0])
    assert windowed.windows == (9, None)
    layout = read_served(checkpoint("minicpm3")[0]).kv_layout(block_size=16, dtype="float32")
    assert [(part.heads, part.width) for part in layout.parts] == [(4, 24), (4, 24)]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "layer_types has linear_attention"),
        ({"model_type": "bart", "architectures": ["BartForCausalLM"]}, "an encoder and a decoder"),
        ({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}, "no position_ids"),
        ({"model_type": "gptj", "architectures": ["GPTJForCausalLM"]}, "does not call the attention interface"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "neither causal nor of a sliding window"),
        ({"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]}, "chunked_attention: (?!.*state)"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, "more than text"),
        ({"model_type": "novel", "architectures": ["NovelForCausalLM"], "auto_map": {}}, r"\(auto_map\) is not run"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_unsupported_models_are_refused_by_name(tmp_path: Path, config: dict[str, Any], why: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=f"{config['architectures'][0]} is not served.*{why}"):
        read_served(tmp_path)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"architectures": ["Qwen3NextForCausalLM"], "linear_conv_kernel_dim": 4}, "state other than keys and values"),
        ({"architectures": ["Mamba2ForCausalLM"], "state_size": 128}, "state other than keys and values"),
        ({"architectures": ["NovelForCausalLM"], "layer_types": ["full_attention", "conv"]}, "conv"),
        ({"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"attention_chunk_size": 8}}, "chunks"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, "more than text"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "an encoder and a decoder"),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_config_json_is_refused_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], why: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=why):
        read_served(tmp_path)


def test_its_memory_is_counted(checkpoint: Checkpoint) -> None:
    folder, oracle = checkpoint("gpt_neox")
    assert weight_bytes(folder, "float32") == 4 * sum(parameter.numel() for parameter in oracle.parameters())


def test_ranks_without_a_plan_are_refused_with_the_reason(checkpoint: Checkpoint) -> None:
    model = read_served(checkpoint("opt")[0])
    with pytest.raises(Misconfigured, match=r"tp is 2: transformers has no plan .*: give 1"):
        check_ranks(model, 2)
    with pytest.raises(Misconfigured, match=r"tp is 4: it must divide 2.*: give 1, 2"):
        check_ranks(read_served(checkpoint("ministral")[0]), 4)


@torch.no_grad()
def test_linear_weights_may_be_rounded_as_they_are_loaded(checkpoint: Checkpoint) -> None:
    folder, oracle = checkpoint("ministral", hidden_size=128, intermediate_size=128)
    tokens = random_tokens(40)
    model = load_transformers(folder, quantize="int8")
    assert model.stored_as.startswith("rounded-int8-g128, layers by transformers")
    ours = PagedRun(model).step([("only", tokens, 40)])[0]
    theirs = oracle(torch.tensor([tokens])).logits[0]
    assert torch.corrcoef(torch.stack([ours.flatten(), theirs.flatten()]))[0, 1] > 0.99


def test_a_tensor_that_is_missing_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, _ = checkpoint("olmoe")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(BadCheckpoint, match=r"'model\.norm\.weight'"):
        load_transformers(tmp_path)
