"""Heads of the demo model: what is trained is what is served, and what ships drafts well, colocated and apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.engine.cpu_engine import DEMO
from benchmarks.speculation.heads import held_out_prompts
from demo.draft_heads import TrainedEagle3, TrainedMedusa
from protos.values import SamplingParams
from tests.numerics import head_twins
from tests.numerics.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.numerics.engines import answer, colocated
from tests.numerics.head_twins import Target
from tests.numerics.moving import disaggregated, handed_over
from workers.engine.engine import Engine
from workers.kernels.cpu.native_build import native
from workers.worker_config import WorkerConfig


def stored(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The stored tensors, read from a file in float32."""
    save_file(tensors, folder / "head.safetensors")
    read = load_file(folder / "head.safetensors")
    return {name: value.float() if value.is_floating_point() else value for name, value in read.items()}


def test_a_head_is_trained_on_its_own_drafts(tmp_path: Path) -> None:
    """Without a cache, by the exported tensors."""
    make_checkpoint("llama", tmp_path)
    target = Target(tmp_path)
    torch.manual_seed(4)
    ids = torch.randperm(VOCAB_SIZE)[:50].sort().values
    head = TrainedEagle3(target.model.config, (0, 1, 2), ids, inner_size=96)
    medusa = TrainedMedusa(target.model.config, 3)
    for module in (head, medusa):
        for parameter in module.parameters():
            parameter.data = (parameter.data * 2).bfloat16().float()
    tensors, medusa_tensors = stored(tmp_path, head.tensors()), stored(tmp_path, medusa.tensors())
    for seed in range(6):
        tokens = torch.randint(3, VOCAB_SIZE, (9 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        drafts = head_twins.eagle3_drafts(tensors, target, tokens, 4, before=False)
        sequence = torch.tensor([[*tokens, *drafts[:3]]])
        with torch.no_grad():
            states = target.model(sequence, output_hidden_states=True).hidden_states
            steps = head.unroll(states, target.model.get_input_embeddings()(sequence), 4)
            last = medusa(states[-1][:, len(tokens) - 2])
        assert [int(ids[logits[0, -1].argmax()]) for logits in steps] == drafts
        assert [int(logits.argmax()) for logits in last] == head_twins.medusa_drafts(medusa_tensors, target, tokens, 3)


def heads_config(speculate: str) -> WorkerConfig:
    return WorkerConfig(
        model=str(DEMO),
        device="cpu",
        dtype="float32",
        num_blocks=64,
        speculate=speculate,
        max_drafts=3,
        prefill_chunk=32,
    )


def acceptance(engine: Engine) -> tuple[float, float]:
    """The acceptance of first drafts, and of all."""
    speculation = engine.scheduler.speculation
    assert speculation is not None
    (counts,) = speculation.counts.sources.values()
    assert sum(counts.drafted_at) > 100
    return counts.accepted_at[0] / counts.drafted_at[0], sum(counts.accepted_at) / sum(counts.drafted_at)


@pytest.mark.skipif(native(torch.float32) is None, reason="no C++ compiler")
@pytest.mark.parametrize("kind", ["eagle:eagle3", "medusa:medusa"])
def test_heads_of_the_demo_model_draft_as_well_apart(kind: str) -> None:
    mode, _, folder = kind.partition(":")
    config = heads_config(f"{mode}:{DEMO.parent / folder}")
    prompts = held_out_prompts(DEMO, 6)["questions"]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with colocated(config) as engine:
        expected = [answer(engine, [prompt], params)[0].token_ids for prompt in prompts]
        first, alone = acceptance(engine)
    with disaggregated(config, config) as (prefill, decode):
        outputs = [handed_over(prefill, decode, prompt, params, f"r{number}") for number, prompt in enumerate(prompts)]
        _, apart = acceptance(decode.engine)
    assert outputs == expected
    assert first > 0.2, "the heads belong to this model"
    assert abs(apart - alone) <= 0.05 * alone
