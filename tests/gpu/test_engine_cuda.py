"""On a GPU the engine says what it says on a CPU, and what transformers says. Left out where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.values import GenerateRequest, SamplingParams
from router.text.grammar.structure import json_grammar, regex_grammar
from tests.numerics import constrained
from tests.numerics.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.numerics.engines import GREEDY, answer, colocated, oracle_answers
from tests.numerics.formats.gptq_encoder import gptq, gptq_config
from tests.numerics.formats.test_experts import write_with_oracle
from workers.models.loader import load_model
from workers.runner.cuda_graphs import why_eager
from workers.worker_config import KVDtype, WorkerConfig

pytestmark = pytest.mark.gpu

LENGTHS = (1, 5, 15, 16, 33, 64, 100, 150)
Oracle = Callable[[str], tuple[Path, list[list[int]]]]


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    tokens: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
    return tokens


PROMPTS = [prompt_of(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """The expected result, on the CPU in float32."""
    oracles: dict[str, tuple[Path, list[list[int]]]] = {}

    def ask(family: str) -> tuple[Path, list[list[int]]]:
        if family not in oracles:
            folder = tmp_path_factory.mktemp(family)
            oracles[family] = folder, oracle_answers(make_checkpoint(family, folder), PROMPTS)
        return oracles[family]

    return ask


def cuda(folder: Path, **settings: Any) -> WorkerConfig:
    return WorkerConfig(model=str(folder), device="cuda", dtype="float32", **settings)


@pytest.mark.parametrize("prefill_chunk", [16, 512])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_greedy_tokens_are_the_oracles(oracle: Oracle, family: str, prefill_chunk: int) -> None:
    folder, expected = oracle(family)
    torch.backends.cuda.matmul.allow_tf32 = False
    with colocated(cuda(folder, prefill_chunk=prefill_chunk, num_blocks=200)) as engine:
        assert [output.token_ids for output in answer(engine, PROMPTS)] == expected
        assert [output.token_ids for output in answer(engine, PROMPTS)] == expected


@pytest.mark.parametrize("settings", [{"cuda_graphs": False}, {"steps_in_flight": 0}, {"steps_in_flight": 2}])
def test_neither_graphs_nor_steps_in_flight_change_a_token(oracle: Oracle, settings: dict[str, Any]) -> None:
    folder, expected = oracle("qwen3")
    torch.backends.cuda.matmul.allow_tf32 = False
    with colocated(cuda(folder, num_blocks=200, **settings)) as engine:
        assert [output.token_ids for output in answer(engine, PROMPTS)] == expected


@pytest.mark.parametrize("settings", [{}, {"steps_in_flight": 0}])
def test_a_grammar_binds_its_rows_and_no_others(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = make_checkpoint("llama", tmp_path, vocab_size=constrained.VOCAB_SIZE, max_position_embeddings=512)
    constrained.write_tokenizer(tmp_path)
    prompts, grammars = constrained.PROMPTS, [json_grammar(constrained.PERSON), regex_grammar("(yes|no), [a-f]{2,30}!")]
    expected = [
        constrained.masked_oracle(tmp_path, model, prompt, grammar, 80)
        for prompt, grammar in zip(prompts, grammars, strict=False)
    ]
    [free] = oracle_answers(model, prompts[2:], 40)
    asked = [constrained.under(grammar) for grammar in grammars] + [constrained.under("", 40, ignore_eos=True)]
    torch.backends.cuda.matmul.allow_tf32 = False
    with colocated(cuda(tmp_path, num_blocks=200, **settings)) as engine:
        assert [output.token_ids for output in answer(engine, prompts, asked)] == [*expected, free]


def test_the_cache_takes_the_cards_free_memory(oracle: Oracle) -> None:
    folder, expected = oracle("llama")
    with colocated(cuda(folder, memory_fraction=0.5)) as engine:
        free, total = torch.cuda.mem_get_info()
        assert 0.4 * total < total - free < 0.6 * total
        engine.submit(GenerateRequest(request_id="r", prompt_ids=tuple(PROMPTS[0]), sampling=GREEDY), now=0.0)
        tokens: list[int] = []
        while engine.has_work():  # not `answer`, which looks at each of millions of blocks after each step
            tokens += [token_id for update in engine.step(0.0) for token_id in update.token_ids]
        assert tokens == expected[0]


def test_seeded_sampling_gives_the_cpus_tokens(oracle: Oracle) -> None:
    folder, _ = oracle("llama")
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=32, ignore_eos=True)
    with colocated(WorkerConfig(model=str(folder), device="cpu", dtype="float32", num_blocks=200)) as engine:
        expected = [output.token_ids for output in answer(engine, PROMPTS, sampling)]
    with colocated(cuda(folder, num_blocks=200)) as engine:
        assert [output.token_ids for output in answer(engine, PROMPTS, sampling)] == expected


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_keys_and_values_in_8_bits_give_the_cpus_tokens(oracle: Oracle, kv_dtype: KVDtype) -> None:
    """Only the first tokens: a key that differs in its last bit may be rounded to another step."""
    folder, _ = oracle("qwen3")
    torch.backends.cuda.matmul.allow_tf32 = False
    settings: dict[str, Any] = {"num_blocks": 200, "kv_dtype": kv_dtype}
    with colocated(WorkerConfig(model=str(folder), device="cpu", dtype="float32", **settings)) as engine:
        expected = [output.token_ids[:4] for output in answer(engine, PROMPTS)]
    with colocated(cuda(folder, **settings)) as engine:
        for _ in range(2):
            assert [output.token_ids[:4] for output in answer(engine, PROMPTS)] == expected


def test_decode_steps_of_quantised_experts_are_graphs(tmp_path: Path) -> None:
    write_with_oracle("mixtral", tmp_path, gptq(), gptq_config())
    decoder = load_model(tmp_path, device="cuda", dtype="bfloat16")
    decoder.pack()
    assert not why_eager(decoder)
    answers = []
    for cuda_graphs in (True, False):
        config = WorkerConfig(
            model=str(tmp_path), device="cuda", dtype="bfloat16", num_blocks=200, cuda_graphs=cuda_graphs
        )
        with colocated(config) as engine:
            answers.append([output.token_ids for output in answer(engine, PROMPTS)])
    assert answers[0] == answers[1]
