"""Heads that draft: what they draft is what plain torch does with the same tensors, and answers stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import BadCheckpoint, BatonError, Misconfigured, UnsupportedModel
from protos.values import SamplingParams
from tests.numerics import head_twins
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.engines import GREEDY, answer, colocated
from tests.numerics.head_twins import Target
from tests.numerics.moving import moved, two
from workers.build_rank import open_rank
from workers.kernels.cpu.native_build import native
from workers.parallel.group import Solo
from workers.speculation.proposer import Draft, DraftQuery
from workers.worker_config import WorkerConfig

pytestmark = pytest.mark.skipif(native(torch.float32) is None, reason="no C++ compiler")
PROMPTS = [list(range(number + 3, number + 3 + length)) for number, length in enumerate((9, 23, 1, 16))]
ALIKE: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
MANY = [SamplingParams(temperature=temperature, seed=3, **ALIKE) for temperature in (0.0, 0.8, 1.0, 0.0)]


def config(target: Path, speculate: str = "off", **changes: Any) -> WorkerConfig:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_drafts": 3, **changes}
    return WorkerConfig(model=str(target), device="cpu", dtype="float32", speculate=speculate, **sizes)


class Recorded:
    """A proposer whose drafts are kept, with the tokens that they follow."""

    def __init__(self, proposer: Any) -> None:
        self._proposer = proposer
        self._tokens: dict[str, Any] = {}
        self.drafts: list[tuple[list[int], Draft]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def __len__(self) -> int:
        return len(self._proposer)

    def begin(self, sequence: Any) -> None:
        self._tokens[sequence.request_id] = sequence
        self._proposer.begin(sequence)

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Draft]:
        drafts: Sequence[Draft] = self._proposer.propose(queries)
        for query, draft in zip(queries, drafts, strict=True):
            sequence = self._tokens[query.request_id]
            self.drafts.append(([*sequence.prompt_ids, *sequence.output_ids], draft))
        return drafts


def num_drafted(engine: Any) -> int:
    count: int = engine.scheduler.speculation.counts.num_drafted
    return count


def recorded(engine: Any) -> Recorded:
    speculation = engine.scheduler.speculation
    *others, proposer = speculation._proposers
    recorder = Recorded(proposer)
    speculation._proposers = (*others, recorder)
    return recorder


Drafts = Callable[[Target, list[int], int], list[int]]


def eagle3(folder: Path) -> tuple[str, Drafts]:
    tensors = head_twins.make_eagle3(folder)
    return f"eagle:{folder}", lambda *given: head_twins.eagle3_drafts(tensors, *given, before=False)


def speculators(folder: Path) -> tuple[str, Drafts]:
    tensors = head_twins.make_eagle3(folder, speculators=True)
    return f"eagle:{folder}", lambda *given: head_twins.eagle3_drafts(tensors, *given, before=True)


def eagle(folder: Path) -> tuple[str, Drafts]:
    tensors = head_twins.make_eagle(folder)
    return f"eagle:{folder}", lambda *given: head_twins.eagle_drafts(tensors, *given)


def medusa(folder: Path) -> tuple[str, Drafts]:
    tensors = head_twins.make_medusa(folder)
    return f"medusa:{folder}", lambda *given: head_twins.medusa_drafts(tensors, *given)


HEADS = {"eagle3": eagle3, "speculators": speculators, "eagle": eagle, "medusa": medusa}


@pytest.mark.parametrize("kind", HEADS)
def test_drafts_equal_those_of_plain_torch(target: Path, tmp_path: Path, kind: str) -> None:
    """At every step of sequences of several lengths, prompts in chunks, with rejected drafts in between."""
    mode, drafts_of = HEADS[kind](tmp_path)
    model = Target(target)
    with colocated(config(target, mode, prefill_chunk=7)) as engine:
        recorder = recorded(engine)
        answer(engine, PROMPTS, GREEDY)
    checked = recorder.drafts[:: len(recorder.drafts) // 24]
    assert len(checked) >= 24
    for tokens, draft in checked:
        assert list(draft.token_ids) == drafts_of(model, tokens, len(draft.token_ids))
    assert len({draft.token_ids for _, draft in checked}) > 5


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    with colocated(config(target)) as engine:
        return [output.token_ids for output in answer(engine, PROMPTS, MANY)]


@pytest.mark.parametrize("kind", HEADS)
def test_heads_change_no_answer(target: Path, plain: list[list[int]], tmp_path: Path, kind: str) -> None:
    """With preemption, and prefix hits in the second run."""
    mode, _ = HEADS[kind](tmp_path)
    with colocated(config(target, mode, num_blocks=24)) as engine:
        for _ in range(2):
            assert [output.token_ids for output in answer(engine, PROMPTS, MANY)] == plain
        assert num_drafted(engine) > 40


def test_every_rank_runs_a_head(target: Path, plain: list[list[int]], tmp_path: Path) -> None:
    mode, _ = speculators(tmp_path)
    with colocated(config(target, mode, tp=2)) as engine:
        assert [output.token_ids for output in answer(engine, PROMPTS, MANY)] == plain
        assert num_drafted(engine) > 40


def test_a_head_begins_anew_where_a_sequence_goes_on(target: Path, tmp_path: Path) -> None:
    mode, _ = eagle3(tmp_path)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
    with colocated(config(target)) as engine:
        (plain,) = answer(engine, [PROMPTS[1]], params)
    with two(config(target, mode)) as (old, new):
        assert moved(old, new, PROMPTS[1], params, num_before=9) == plain.token_ids
        assert num_drafted(new.engine) > 10


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_mtp_layers_draft_as_in_transformers(tmp_path: Path, family: str) -> None:
    """And change no answer."""
    folder = tmp_path / "model"
    make_checkpoint(family, folder)
    head_twins.add_mtp(folder)
    with colocated(config(folder)) as engine:
        plain = [output.token_ids for output in answer(engine, PROMPTS, GREEDY)]
    with colocated(config(folder, "mtp", num_blocks=40)) as engine:
        recorder = recorded(engine)
        assert [output.token_ids for output in answer(engine, PROMPTS, GREEDY)] == plain
        assert engine.scheduler.num_preemptions
    twin, model = head_twins.MTPTwin(folder, tmp_path / "copy"), Target(folder)
    for tokens, draft in recorder.drafts[:: len(recorder.drafts) // 8]:
        assert list(draft.token_ids) == twin.drafts(model, tokens, len(draft.token_ids))


def eagle_with(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], str]:
    """An EAGLE-3 head whose stored tensors are changed."""

    def made(folder: Path) -> str:
        mode, _ = eagle3(folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return mode

    return made


def pickled(folder: Path) -> str:
    mode, _ = medusa(folder)
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.pt")
    return mode


def lossy(folder: Path) -> str:
    head_twins.make_medusa(folder, posterior_threshold=0.09)
    return f"medusa:{folder}"


def of_another_target(folder: Path) -> str:
    mode, _ = eagle3(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 160', '"vocab_size": 99'))
    return mode


def of_more_heads(folder: Path) -> str:
    head_twins.make_medusa(folder, medusa_num_heads=5)
    return f"medusa:{folder}"


def of_the_other_kind(folder: Path) -> str:
    mode, _ = medusa(folder)
    return mode.replace("medusa", "eagle", 1)


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        (eagle_with(lambda head: head.pop("midlayer.mlp.up_proj.weight")), BadCheckpoint, "'layers.0.mlp.up_proj"),
        (eagle_with(lambda head: head.pop("d2t")), BadCheckpoint, "lacks 'd2t'"),
        (pickled, BadCheckpoint, "pickled weights only"),
        (lossy, UnsupportedModel, "posterior_threshold"),
        (of_another_target, Misconfigured, "99 tokens, the model 160"),
        (eagle_with(lambda head: head.update(d2t=head["d2t"] - 99)), BadCheckpoint, "d2t leads to tokens -"),
        (of_more_heads, BadCheckpoint, "medusa_num_heads is 5, and there are tensors of 3 heads"),
        (
            eagle_with(lambda head: head.update({"fc.weight": head["fc.weight"].to(torch.int8)})),
            UnsupportedModel,
            "'fc.weight' is stored as I8",
        ),
        (of_the_other_kind, UnsupportedModel, "has 0 layers"),
        (lambda folder: f"eagle:{folder / 'nowhere'}", BadCheckpoint, "there is no .*nowhere"),
        (lambda folder: "mtp", Misconfigured, "no layers for multi-token prediction"),
        (lambda folder: "mtp:x", Misconfigured, "choose one of"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(
    target: Path, tmp_path: Path, made: Callable[[Path], str], error: type[BatonError], words: str
) -> None:
    with pytest.raises(error, match=words):
        open_rank(config(target, made(tmp_path)), Solo())


def test_steps_ahead_of_a_head_are_refused(target: Path, tmp_path: Path) -> None:
    mode, _ = eagle3(tmp_path)
    with pytest.raises(Misconfigured, match="steps_in_flight = 1"):
        open_rank(config(target, mode, steps_in_flight=1), Solo())
