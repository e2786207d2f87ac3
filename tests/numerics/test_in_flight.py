"""Steps in flight on a real model: tokens go from step to step without the host, and stay the oracle's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protos.values import SamplingParams
from tests.numerics.checkpoints import VOCAB_SIZE
from tests.numerics.conftest import Checkpoint, random_tokens
from tests.numerics.engines import answer, colocated, oracle_answers
from workers.attention.backend import AttentionInputs, AttentionOptions, CosSin
from workers.batch import Batch, Row, Sample
from workers.grammar.grammar_seam import Mask
from workers.kernels import twins
from workers.models.decoder import Decoder
from workers.models.model_config import read_config
from workers.parallel.group import Solo
from workers.runner.torch_runner import TorchRunner
from workers.weights.encoding import LayerContext
from workers.weights.formats.float_matrix import only_floats
from workers.worker_config import WorkerConfig

PROMPTS = [random_tokens(length, seed=length) for length in (1, 5, 16, 33, 100)]
NUM_TOKENS = sum(map(len, PROMPTS)) + 64 * len(PROMPTS)
PLENTY, SCARCE = 2 * NUM_TOKENS // 16, NUM_TOKENS // 16 // 2


def config_of(folder: Path, **settings: Any) -> WorkerConfig:
    own: dict[str, Any] = {"model": str(folder), "device": "cpu", "prefill_chunk": 16, "num_blocks": PLENTY}
    return WorkerConfig(**(own | settings))


@pytest.mark.parametrize("num_blocks", [PLENTY, SCARCE], ids=["plenty", "scarce"])
@pytest.mark.parametrize(("steps", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_greedy_tokens_are_the_oracles(checkpoint: Checkpoint, steps: int, tp: int, num_blocks: int) -> None:
    folder, model = checkpoint("qwen3")
    with colocated(config_of(folder, steps_in_flight=steps, tp=tp, num_blocks=num_blocks)) as engine:
        assert [output.token_ids for output in answer(engine, PROMPTS)] == oracle_answers(model, PROMPTS)
        assert (engine.scheduler.num_preemptions > 0) == (num_blocks == SCARCE)


def test_whatever_is_asked_for_is_told_as_without(checkpoint: Checkpoint) -> None:
    """Penalties, stops, logprobs of prompt and answer, seeds, a banned end: side by side in one batch."""
    folder, _ = checkpoint("llama")
    asked = [
        SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1.3, logprobs=3),
        SamplingParams(temperature=1.0, max_tokens=24, seed=5, prompt_logprobs=2),
        SamplingParams(temperature=0.7, max_tokens=12, seed=6, top_p=0.8, logprobs=0),
        SamplingParams(temperature=0.0, max_tokens=30, min_tokens=10, stop_token_ids=tuple(range(60))),
        SamplingParams(
            temperature=0.0, max_tokens=30, presence_penalty=-2.0, frequency_penalty=-2.0, logit_bias=((7, 1.0),)
        ),
    ]
    told = []
    for steps in (0, 1):
        with colocated(config_of(folder, steps_in_flight=steps)) as engine:
            told.append(answer(engine, PROMPTS, asked))
    for without, with_ in zip(*told, strict=True):
        assert with_.token_ids == without.token_ids
        assert with_.finish_reason is without.finish_reason
        for field in ("logprobs", "prompt_logprobs"):
            ours, theirs = (
                [item for update in told.updates for item in getattr(update, field)] for told in (with_, without)
            )
            assert [output.chosen.token_id for output in ours] == [output.chosen.token_id for output in theirs]
            assert [output.chosen.logprob for output in ours] == pytest.approx(
                [output.chosen.logprob for output in theirs], abs=1e-5
            )


class Valueless:
    """Stands where a GPU is missing: tensors on torch's meta device have shapes and no values, so that whoever looks
    at one, and on a GPU would wait for it, raises. Its kernels are the reference's; attention only keeps its shapes."""

    def __init__(self) -> None:
        self.num_attended = 0

    def begin(self, inputs: AttentionInputs) -> None:
        assert inputs.tables[0].block_tables_SB.is_meta

    def write(
        self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rotation: CosSin
    ) -> torch.Tensor:
        return twins.rope(q_TND, *rotation)

    def attend(self, layer: int, q_TND: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        self.num_attended += 1
        return torch.empty_like(q_TND)


class Everything:
    """`Grammars` of which each allows it."""

    listener: Callable[[], None] = print

    def begin(self, request_id: str, grammar: str, output_ids: tuple[int, ...]) -> None: ...

    def pending(self) -> Collection[str]:
        return ()

    def release(self, request_ids: Collection[str]) -> None: ...

    def __len__(self) -> int:
        return 0

    def draft(self, request_id: str, draft_ids: tuple[int, ...]) -> None: ...

    def allowed_after(self, request_id: str, samples: Sequence[Sample]) -> Sequence[Mask]:
        return ()

    def allowed(self, request_id: str, sample: Sample) -> Mask:
        return np.full(VOCAB_SIZE // 32, -1, dtype=np.int32)


def test_no_launch_reads_values_on_the_host(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one with penalties, bias, bans, logprobs or a grammar; only the fetch does."""
    folder, _ = checkpoint("llama")
    config = read_config(folder)
    monkeypatch.setattr("workers.sampling.sampler._choose", lambda logits_RV, samples: logits_RV.argmax(dim=-1))
    context = LayerContext(device="meta", dtype=torch.float32, parallel=Solo(), kernels=twins, encodings=only_floats)
    attention = Valueless()
    runner = TorchRunner(Decoder(config, context), attention, block_size=16, grammars=Everything())
    plain, bound = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, grammar="start: /.*/")
    busy = SamplingParams(seed=1, logprobs=4, frequency_penalty=0.2, repetition_penalty=1.1, logit_bias=((3, 1.0),))

    def row(name: str, params: SamplingParams, **context: Any) -> Row:
        tokens = {"prompt_ids": (5, 6), "output_ids": (7,), "banned_ids": (2,)} if params is busy else {}
        return Row(request_id=name, block_tables=((0, 1),), sample=Sample(params=params, index=1, **tokens), **context)

    prompts = (row("a", plain, token_ids=(5, 6, 7), start=0), row("b", busy, token_ids=(5, 6), start=0))
    runner.launch(Batch(rows=(*prompts, row("c", bound, token_ids=(5, 6), start=0))))
    for start in (3, 4, 5):
        following = (
            row("a", plain, token_ids=(), start=start, depends_on_row=0),
            row("b", busy, token_ids=(), start=start - 1, depends_on_row=1),
        )
        step = runner.launch(Batch(rows=following))
    assert attention.num_attended == 4 * config.num_layers
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        step.fetch()
