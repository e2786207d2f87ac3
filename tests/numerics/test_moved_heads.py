"""A head drafts the same after a transfer: its KV goes with the model's to other workers, and to the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.values import SamplingParams
from tests.numerics import head_twins
from tests.numerics.engines import answer, colocated
from tests.numerics.moving import disaggregated, handed_over, moved, pulled, two
from workers.kernels.cpu.native_build import native
from workers.worker_config import WorkerConfig

pytestmark = pytest.mark.skipif(native(torch.float32) is None, reason="no C++ compiler")
PROMPT = list(range(3, 42))
PARAMS = SamplingParams(temperature=0.7, seed=5, max_tokens=30, ignore_eos=True)

Alone = tuple[list[int], dict[int, tuple[int, ...]]]
"""The tokens of a colocated engine, and its drafts by the length that they follow."""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("head")
    head_twins.make_eagle3(folder)
    return f"eagle:{folder}"


def config(target: Path, speculate: str = "off", **changes: Any) -> WorkerConfig:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_drafts": 3, "prefill_chunk": 16, **changes}
    return WorkerConfig(model=str(target), device="cpu", dtype="float32", speculate=speculate, **sizes)


class Drafts:
    """The drafts of an engine's proposer after each known length of a sequence."""

    def __init__(self, engine: Any) -> None:
        *_, self._proposer = engine.scheduler.speculation._proposers
        self._propose = self._proposer.propose
        self._lengths: dict[str, Any] = self._proposer._sequences
        self.after: dict[int, tuple[int, ...]] = {}
        self._proposer.propose = self.propose

    def propose(self, queries: Sequence[Any]) -> Sequence[Any]:
        drafts = self._propose(queries)
        for query, draft in zip(queries, drafts, strict=True):
            sequence = self._lengths[query.request_id].sequence
            self.after[len(sequence.prompt_ids) + len(sequence.output_ids)] = draft.token_ids
        return drafts


@pytest.fixture(scope="module")
def alone(target: Path, head: str) -> Alone:
    with colocated(config(target, head)) as engine:
        drafts = Drafts(engine)
        (output,) = answer(engine, [PROMPT], PARAMS)
    assert sum(map(len, drafts.after.values())) > 60
    return output.token_ids, drafts.after


@pytest.mark.parametrize("block_size", [4, 8])
def test_a_decode_worker_drafts_as_if_it_had_computed_the_prompt(
    target: Path, head: str, alone: Alone, block_size: int
) -> None:
    tokens, expected = alone
    with disaggregated(config(target, head, block_size=block_size), config(target, head)) as (first, then):
        drafts = Drafts(then.engine)
        assert handed_over(first, then, PROMPT, PARAMS) == tokens
    assert drafts.after == {length: ids for length, ids in expected.items() if length in drafts.after}
    assert len(drafts.after) >= len(expected) - 1, "the first draft of a colocated engine follows its first token"


def test_a_sequence_that_moves_keeps_its_drafts(target: Path, head: str, alone: Alone) -> None:
    tokens, expected = alone
    with two(config(target, head)) as (old, new):
        drafts = Drafts(new.engine)
        assert moved(old, new, PROMPT, PARAMS, num_before=9) == tokens
    assert len(drafts.after) > 8
    assert drafts.after == {length: ids for length, ids in expected.items() if length in drafts.after}


def test_a_pulled_prefix_brings_the_heads_part(target: Path, head: str, alone: Alone) -> None:
    tokens, expected = alone
    with two(config(target, head)) as (old, new):
        drafts = Drafts(new.engine)
        output, num_pulled = pulled(old, new, PROMPT, PARAMS)
    assert output == tokens
    assert num_pulled == 36
    assert drafts.after == expected


def test_the_host_tier_keeps_the_kv_of_draft_heads(target: Path, head: str, alone: Alone) -> None:
    tokens, expected = alone
    small = config(target, head, num_blocks=20, host_kv_gib=0.001)
    with colocated(small) as engine:
        assert answer(engine, [PROMPT], PARAMS)[0].token_ids == tokens
        answer(engine, [list(range(60, 130))], SamplingParams(max_tokens=4, ignore_eos=True))
        drafts = Drafts(engine)
        assert answer(engine, [PROMPT], PARAMS)[0].token_ids == tokens
        load = engine.load().host
    assert load is not None
    assert load.num_hit_tokens >= 32
    assert drafts.after == expected


def test_a_request_without_drafts_leaves_its_entries_to_the_next(target: Path, head: str, alone: Alone) -> None:
    from msgspec.structs import replace

    from protos.values import SpeculationParams

    tokens, expected = alone
    silent = replace(PARAMS, speculation=SpeculationParams(mode="off"), max_tokens=1)
    with colocated(config(target, head)) as engine:
        answer(engine, [PROMPT], silent)
        drafts = Drafts(engine)
        (output,) = answer(engine, [PROMPT], PARAMS)
    assert output.token_ids == tokens
    assert output.num_cached_tokens == 36
    assert drafts.after == expected


def test_blocks_of_a_worker_without_the_head_are_left_out(target: Path, head: str, alone: Alone) -> None:
    tokens, _ = alone
    with disaggregated(config(target), config(target, head)) as (first, then):
        assert handed_over(first, then, PROMPT, PARAMS) == tokens
        speculation = then.engine.scheduler.speculation
        assert speculation is not None
        num_drafted = speculation.counts.num_drafted
        assert num_drafted > 10
        assert len(then.engine.pool.headless) == 10
        assert handed_over(first, then, PROMPT, PARAMS, "again") == tokens
        assert speculation.counts.num_drafted > num_drafted


def test_blocks_without_movable_head_kv_are_left_out(target: Path, head: str, alone: Alone) -> None:
    """Ranks cannot cut this head's heads as the model's: layouts name no head then."""
    tokens, _ = alone
    with disaggregated(config(target), config(target)) as (first, then):
        then.engine.pool.head_stays = True
        assert handed_over(first, then, PROMPT, PARAMS) == tokens
        assert len(then.engine.pool.headless) == 10
