"""A whole engine with adapters: greedy tokens of merged weights, on one rank and two, and adapters that come and go."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kvtransfer.hashing import salted
from protos.errors import AdapterNotLoaded, InvalidRequest, Misconfigured, NotFound
from protos.values import GenerateRequest, SamplingParams, SpeculationParams
from tests.numerics.adapters import make_adapter, merged_model
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.conftest import random_tokens
from tests.numerics.engines import GREEDY, Answer, colocated, oracle_answers
from workers.engine.engine import Engine
from workers.worker_config import WorkerConfig

PROMPTS = [random_tokens(length, seed=length) for length in (5, 40, 64)]
NUM_TOKENS = 12
SAMPLING = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def load(engine: Engine, name: str, path: Path) -> str:
    assert engine.adapters is not None
    return engine.adapters.load(name, engine.adapters.check(name, str(path))).adapter_id


def submit(engine: Engine, request_id: str, prompt: list[int], adapter: str, sampling: SamplingParams = GREEDY) -> None:
    request = GenerateRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=sampling,
        cache_salt=salted(b"", adapter.encode()),
        adapter=adapter,
    )
    engine.submit(request, now=0.0)


def answers_of(engine: Engine, adapters: list[str]) -> dict[str, list[Answer]]:
    """Every prompt with every adapter, all in one batch."""
    answers = {adapter: [Answer() for _ in PROMPTS] for adapter in adapters}
    for number, prompt in enumerate(PROMPTS):
        for adapter in adapters:
            submit(engine, f"{adapter}/{number}", prompt, adapter, SAMPLING)
    while engine.has_work():
        for update in engine.step(now=0.0):
            assert update.error is None
            adapter, _, place = update.request_id.partition("/")
            answers[adapter][int(place)].token_ids += update.token_ids
            answers[adapter][int(place)].updates.append(update)
        engine.check_integrity()
    engine.assert_idle()
    return answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and its adapters `one` and `two`."""
    folder = tmp_path_factory.mktemp("adapters")
    make_checkpoint("llama", folder / "model")
    for rank, name in ((4, "one"), (8, "two")):
        make_adapter(folder / "model", folder / name, seed=rank, rank=rank)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[list[int]]]:
    """Answers by the adapter's name, by transformers with merged weights."""
    tokens = {}
    for name in ("", "one", "two"):
        model = make_checkpoint("llama", folder / "again")
        tokens[name] = oracle_answers(merged_model(model, folder / name) if name else model, PROMPTS, NUM_TOKENS)
    return tokens


@pytest.mark.parametrize("tp", [1, 2])
def test_greedy_tokens_equal_those_of_merged_weights(
    folder: Path, expected: dict[str, list[list[int]]], tp: int
) -> None:
    """One batch has two adapters and none, and runs again from separate cached prefixes."""
    config = WorkerConfig(model=str(folder / "model"), tp=tp, num_blocks=128, device="cpu", prefill_chunk=32)
    with colocated(config) as engine:
        ids = {name: load(engine, name, folder / name) for name in ("one", "two")} | {"": ""}
        for num_cached in (0, 48):
            outputs = answers_of(engine, list(ids.values()))
            for name, adapter_id in ids.items():
                assert [output.token_ids for output in outputs[adapter_id]] == expected[name], (
                    f"of {name or 'the model'}"
                )
                assert outputs[adapter_id][2].num_cached_tokens == num_cached


def test_drafts_change_no_token(folder: Path, expected: dict[str, list[list[int]]]) -> None:
    """The client predicts the answer: each row's drafts are verified with its own adapter."""
    config = WorkerConfig(model=str(folder / "model"), num_blocks=128, device="cpu", speculate="ngram")
    with colocated(config) as engine:
        ids = {"one": load(engine, "one", folder / "one"), "": ""}
        for name, adapter_id in ids.items():
            predicted = SpeculationParams(prediction_ids=tuple(expected[name][2]))
            submit(engine, name, PROMPTS[2], adapter_id, replace(SAMPLING, speculation=predicted))
        tokens: dict[str, list[int]] = {name: [] for name in ids}
        accepted = 0
        while engine.has_work():
            for update in engine.step(now=0.0):
                tokens[update.request_id] += update.token_ids
                accepted += update.num_predicted
    assert tokens == {name: expected[name][2] for name in ids}
    assert accepted > NUM_TOKENS, "both answers were drafted"


def test_an_adapter_ends_with_its_last_request(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "model")
    first = make_adapter(tmp_path / "model", tmp_path / "first", seed=1)
    second = make_adapter(tmp_path / "model", tmp_path / "second", seed=2)
    config = WorkerConfig(model=str(tmp_path / "model"), num_blocks=64, device="cpu", max_adapters=2)
    with colocated(config) as engine:
        adapters = engine.adapters
        assert adapters is not None
        old = load(engine, "a", first)
        submit(engine, "running", PROMPTS[1], old, SAMPLING)
        engine.step(now=0.0)
        new = load(engine, "a", second)
        assert [adapter.adapter_id for adapter in adapters.served.adapters] == [new]
        submit(engine, "on its way", PROMPTS[0], old, SAMPLING)
        adapters.retire_replaced()  # as the next order does
        with pytest.raises(AdapterNotLoaded):
            submit(engine, "late", PROMPTS[0], old)
        with pytest.raises(Misconfigured, match="2 adapters are loaded"):
            load(engine, "b", make_adapter(tmp_path / "model", tmp_path / "third", seed=3))
        updates = [update for _ in range(NUM_TOKENS) for update in engine.step(now=0.0)]
        tokens = sum(len(update.token_ids) for update in updates if update.request_id == "running")
        assert tokens == NUM_TOKENS - 1, "the running request keeps the old files to its end"
        load(engine, "b", tmp_path / "third")
        adapters.unload("b")
        engine.free_adapters()
        with pytest.raises(NotFound, match="no adapter 'b' is loaded: there are a"):
            adapters.unload("b")
        for name in ("", "a b", "a\n", "model"):
            with pytest.raises(InvalidRequest, match=r"cannot name an adapter|name of the model itself"):
                adapters.check(name, str(first))
