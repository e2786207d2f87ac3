"""Every family through the engine, however a sequence gets there: its tokens and logits are those of transformers. The
logits of all their options are in test_families.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protos.values import SamplingParams
from tests.numerics.checkpoints import FAMILIES, make_checkpoint
from tests.numerics.conftest import Checkpoint, assert_close, random_tokens
from tests.numerics.engines import answer, oracle_answers
from tests.numerics.formats.test_experts import LINEAR, oracle_of
from tests.numerics.formats.test_rounded import by_the_rule
from tests.numerics.moving import moved, two
from tests.numerics.paged import PagedRun
from tests.numerics.test_tensor_parallel import on_ranks
from workers.models.loader import load_model
from workers.parallel.group import TensorParallel
from workers.worker_config import WorkerConfig

PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}
OVERRIDES: dict[str, dict[str, Any]] = {"phi3": PARTIAL, "starcoder2": {"sliding_window": 5}}
PROMPTS = [random_tokens(length, seed=length) for length in (1, 40, 70)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
SCARCE = 11


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_oracles_cold_warm_preempted_and_moved(family: str, checkpoint: Checkpoint) -> None:
    """In chunks of 16 with few blocks, then on a worker with chunks of 512 and many. Windows are shorter than a
    block."""
    folder, model = checkpoint(family, **OVERRIDES.get(family, {}))
    expected = oracle_answers(model, PROMPTS, PARAMS.max_tokens)
    small = WorkerConfig(model=str(folder), prefill_chunk=16, num_blocks=SCARCE, device="cpu", bind_cores="off")
    with two(small, replace(small, prefill_chunk=512, num_blocks=30)) as (old, new):
        assert [output.token_ids for output in answer(old.engine, PROMPTS, PARAMS)] == expected
        assert old.engine.scheduler.num_preemptions > 0 or old.engine.pool.has_windows
        cold = answer(new.engine, PROMPTS[:2], PARAMS)
        assert moved(old, new, PROMPTS[2], PARAMS, num_before=9) == expected[2]
        warm = answer(new.engine, PROMPTS, PARAMS)
    assert [output.token_ids for output in cold] == expected[:2]
    assert [output.token_ids for output in warm] == expected
    cached = [output.num_cached_tokens for output in warm]
    assert cached[:2] == [0, 32]
    assert cached[2] == 64 or new.engine.pool.has_windows, "what a window no longer reads did not move"


def _continued(
    known: dict[str, tuple[Path, Any]],
    before: dict[str, list[PagedRun]],
    tokens: list[int],
    cuts: Sequence[int],
    group: TensorParallel,
) -> dict[str, tuple[PagedRun, torch.Tensor]]:
    """Logits of this rank for the tokens, after the KV of another worker's ranks."""
    logits = {}
    for family, (folder, _) in known.items():
        run = PagedRun(load_model(folder, parallel=group, packed=True), fused=True)
        if before:
            run.adopt("only", before[family], group.rank)
        at, made = 0, []
        for count in cuts:
            made += run.step([("only", tokens[at : at + count], 38)])
            at += count
        logits[family] = run, torch.cat(made)
    return logits


@torch.no_grad()
def test_a_prompt_of_two_ranks_goes_on_with_four_and_with_one(checkpoint: Checkpoint) -> None:
    """All families in one group of ranks; four ranks copy two key/value heads."""
    folders = {family: checkpoint(family, **OVERRIDES.get(family, {})) for family in FAMILIES}
    tokens, logits = random_tokens(41), dict[str, list[torch.Tensor]]()
    before: dict[str, list[PagedRun]] = {}
    for tp, start, cuts in ((2, 0, (24, 6)), (4, 30, (7, 1)), (1, 38, (2, 1))):
        every = on_ranks(tp, partial(_continued, folders, before, tokens[start : start + sum(cuts)], cuts))
        before = {family: [rank[family][0] for rank in every] for family in folders}
        for family in folders:
            for rank in every:
                assert torch.equal(rank[family][1], every[0][family][1])
            logits.setdefault(family, []).append(every[0][family][1])
    for family, (_, oracle) in folders.items():
        assert_close(torch.cat(logits[family]), oracle(torch.tensor([tokens])).logits[0])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_weights_are_rounded_as_they_are_loaded(family: str, tmp_path: Path) -> None:
    """`worker.quantize`: linear weights, experts among them, are those of the rule, all others as they are stored."""
    sizes = {"hidden_size": 128, "tie_word_embeddings": False}
    make_checkpoint(family, tmp_path, **(OVERRIDES.get(family, {}) | sizes))
    model = load_model(tmp_path, quantize="int8", packed=True)
    run, tokens = PagedRun(model, fused=True), random_tokens(33, seed=1)
    ours = torch.cat([run.step([("only", part, 33)])[0] for part in (tokens[:20], tokens[20:])])
    tensors = load_file(tmp_path / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):  # gpt-oss: [experts, inputs, outputs]
            rows = by_the_rule("_proj.weight", weight.transpose(1, 2).flatten(0, 1), "int8")
            tensors[name] = rows.unflatten(0, (len(weight), -1)).transpose(1, 2)
        elif LINEAR.fullmatch(name) or name.startswith("lm_head") or name.endswith((".c_fc.weight", "_mqa.weight")):
            tensors[name] = by_the_rule("_proj.weight", weight, "int8")
    assert_close(ours, oracle_of(tmp_path, tensors)(torch.tensor([tokens])).logits[0])
