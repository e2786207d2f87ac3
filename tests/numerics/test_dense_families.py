"""Families that are specs over the stack, through the whole engine, over ranks, and quantised. Logits of all their
options: test_families.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import UnsupportedModel
from protos.values import SamplingParams
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.conftest import Checkpoint, assert_close, random_tokens
from tests.numerics.engines import answer, colocated, oracle_answers
from tests.numerics.formats.awq_encoder import awq
from tests.numerics.formats.gptq_encoder import gptq, gptq_config
from tests.numerics.formats.served import Encode, assert_served, write_quantised
from tests.numerics.formats.test_awq import CONFIG as AWQ
from tests.numerics.formats.test_rounded import by_the_rule
from tests.numerics.paged import PagedRun, in_chunks
from tests.numerics.test_tensor_parallel import on_ranks
from workers.config import WorkerConfig
from workers.models.config import weight_bytes
from workers.models.loader import load_model
from workers.parallel.group import TensorParallel
from workers.quantise.quantise import check_float_folder

PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gemma3": {},
    "phi3": PARTIAL,
    "olmo2": {},
    "granite": {},
    "glm4": {},
    "smollm3": {},
    "starcoder2": {"sliding_window": 5},
    "cohere2": {},
}
PROMPTS = [random_tokens(length, seed=length) for length in (1, 17, 70)]
NUM_ANSWER = 20


@pytest.mark.parametrize("family", MODELS)
def test_greedy_tokens_are_the_oracles_cold_and_warm(family: str, checkpoint: Checkpoint) -> None:
    """In chunks of 16; the second time from the prefix cache. Windows are shorter than a block."""
    folder, model = checkpoint(family, **MODELS[family])
    params = SamplingParams(temperature=0.0, max_tokens=NUM_ANSWER, ignore_eos=True)
    expected = oracle_answers(model, PROMPTS, NUM_ANSWER)
    config = WorkerConfig(model=str(folder), prefill_chunk=16, num_blocks=30, device="cpu")
    with colocated(config) as engine:
        cold = answer(engine, PROMPTS, params)
        warm = answer(engine, PROMPTS, params)
    assert [one.token_ids for one in cold] == expected
    assert [one.token_ids for one in warm] == expected
    assert [one.num_cached_tokens for one in warm] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


@pytest.mark.parametrize("tp", [2, 4])
@torch.no_grad()
def test_logits_do_not_depend_on_the_number_of_ranks(tp: int, checkpoint: Checkpoint) -> None:
    """All families in one group of ranks; four ranks copy each of two key/value heads."""
    folders = {family: checkpoint(family, **overrides) for family, overrides in MODELS.items()}
    tokens = random_tokens(41)

    def program(group: TensorParallel) -> dict[str, torch.Tensor]:
        return {
            family: in_chunks(PagedRun(load_model(folder, parallel=group)), tokens, [24, 14], prompt_len=38)
            for family, (folder, _) in folders.items()
        }

    every_rank = on_ranks(tp, program)
    for family, (_, oracle) in folders.items():
        for logits in every_rank:
            assert torch.equal(logits[family], every_rank[0][family])
        assert_close(every_rank[0][family], oracle(torch.tensor([tokens])).logits[0])


@torch.no_grad()
def test_weights_rounded_at_load_are_those_of_each_row(tmp_path: Path) -> None:
    """Rows of fused tensors, and rows that rope reorders, keep their own scales."""
    oracles: dict[str, Any] = {}
    for family in ("phi3", "glm4", "starcoder2"):
        overrides = MODELS[family] | {"hidden_size": 128, "tie_word_embeddings": False}
        oracles[family] = oracle = make_checkpoint(family, tmp_path / family, **overrides)
        for name, weight in oracle.named_parameters():
            weight.copy_(by_the_rule(name.replace("c_fc", "c_proj"), weight, "int8"))
        floats, integers = (weight_bytes(tmp_path / family, "float32", levels) for levels in ("off", "int8"))
        assert integers < 0.5 * floats
        with pytest.raises(UnsupportedModel, match=f"how {family} stores .* set worker.quantize"):
            check_float_folder(tmp_path / family)
    tokens = random_tokens(33, seed=1)

    def program(group: TensorParallel) -> dict[str, torch.Tensor]:
        logits = {}
        for family in oracles:
            model = load_model(tmp_path / family, quantize="int8", parallel=group)
            model.pack()
            logits[family] = PagedRun(model).step([("only", tokens, 33)])[0]
        return logits

    for every in on_ranks(2, program):
        for family, oracle in oracles.items():
            assert_close(every[family], oracle(torch.tensor([tokens])).logits[0])


@pytest.mark.parametrize(
    ("family", "encode", "config", "tp"),
    [
        ("phi3", gptq(act_order=True), gptq_config(desc_act=True), 2),
        ("glm4", awq(), AWQ, 2),
        ("starcoder2", gptq(), gptq_config(), 1),
    ],
    ids=["phi3-gptq-tp2", "glm4-awq-tp2", "starcoder2-gptq"],
)
def test_quantised_checkpoints_are_served(
    family: str, encode: Encode, config: dict[str, Any], tp: int, tmp_path: Path
) -> None:
    """Fused tensors, rows in rope's order, other names, and biases."""
    oracle = write_quantised(family, tmp_path, encode, config, tie_word_embeddings=False, **MODELS[family])
    assert_served(tmp_path, oracle, tp=tp, compiled=family != "starcoder2")
