"""Every sampling parameter against a reference in plain Python, and what a user may rely on: a request's tokens depend
on nothing but its own logits, its parameters and its seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.values import Logprobs, SamplingParams
from workers.batch import RowOutput, Sample
from workers.sampling.penalties import NONE, penalise
from workers.sampling.philox import uniforms
from workers.sampling.sampler import _mask, _mask_on_device
from workers.sampling.sampler import sample as begin
from workers.sampling.token_scores import TokenScores

VOCAB = 24


def sample(logits: torch.Tensor, samples: Sequence[Sample]) -> list[RowOutput]:
    return begin(logits, samples).fetch()


def score(logits: torch.Tensor, token_ids: Sequence[int], nums_top: Sequence[int]) -> list[Logprobs]:
    return TokenScores(logits, torch.tensor(token_ids), nums_top).fetch()


def make(index: int = 0, *, prompt: Sequence[int] = (), output: Sequence[int] = (), ban: Sequence[int] = (),
         **params: Any) -> Sample:  # fmt: skip
    return Sample(
        params=SamplingParams(**params),
        index=index,
        prompt_ids=tuple(prompt),
        output_ids=tuple(output),
        banned_ids=tuple(ban),
    )


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def reference_logits(logits: Sequence[float], one: Sample) -> list[float]:
    """Bans, bias and penalties, one token at a time."""
    params, result = one.params, list(logits)
    for token_id in range(len(result)):
        if token_id in one.banned_ids:
            result[token_id] = -math.inf
        result[token_id] += sum(value for biased, value in params.logit_bias if biased == token_id)
        if token_id in one.prompt_ids or token_id in one.output_ids:
            penalty = params.repetition_penalty
            result[token_id] = result[token_id] / penalty if result[token_id] > 0 else result[token_id] * penalty
        if count := one.output_ids.count(token_id):
            result[token_id] -= params.presence_penalty + count * params.frequency_penalty
    return result


def reference_probs(logits: Sequence[float], one: Sample) -> list[float]:
    """The distribution of `one`, by the filters' definitions."""
    params = one.params
    scaled = [value / params.temperature for value in reference_logits(logits, one)]
    weights = [math.exp(value - max(scaled)) for value in scaled]
    weights = [weight if weight >= params.min_p * max(weights) else 0.0 for weight in weights]
    ranking = sorted(range(len(weights)), key=lambda token_id: (-weights[token_id], token_id))
    ranked = ranking[: params.top_k] if params.top_k else ranking
    total, mass, nucleus = sum(weights[token_id] for token_id in ranked), 0.0, []
    for token_id in ranked:
        nucleus.append(token_id)
        mass += weights[token_id] / total
        if mass >= params.top_p:
            break
    norm = sum(weights[token_id] for token_id in nucleus)
    return [weight / norm if token_id in nucleus else 0.0 for token_id, weight in enumerate(weights)]


def reference_choice(logits: Sequence[float], one: Sample) -> int:
    if one.params.temperature == 0:
        adjusted = reference_logits(logits, one)
        return adjusted.index(max(adjusted))
    uniform, cumulative = float(uniforms([one.params.seed], [one.index])[0]), 0.0
    for token_id, prob in enumerate(reference_probs(logits, one)):
        cumulative += prob
        if cumulative > uniform:
            return token_id
    raise AssertionError("the random number was not below 1")


token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=12)
all_samples = st.builds(
    make,
    st.integers(0, 5000),
    prompt=token_lists,
    output=token_lists,
    ban=st.lists(st.integers(0, VOCAB - 1), max_size=4),
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 5, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    logit_bias=st.sampled_from([(), ((3, 100.0),), ((0, -100.0), (7, 2.5))]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=80)
@given(st.lists(all_samples, min_size=1, max_size=6), st.integers(0, 2**31))
def test_every_choice_is_the_reference_choice(samples: list[Sample], seed: int) -> None:
    logits = random_logits(len(samples), seed)
    chosen = [row.token_ids[0] for row in sample(logits, samples)]
    assert chosen == [reference_choice(logits[row].tolist(), number) for row, number in enumerate(samples)]


@settings(max_examples=30)
@given(st.lists(all_samples, min_size=2, max_size=8), st.integers(0, 2**31), st.randoms(use_true_random=False))
def test_a_row_does_not_see_its_batch(samples: list[Sample], seed: int, random: Any) -> None:
    logits = random_logits(len(samples), seed, vocab=300)
    together = sample(logits, samples)
    order = list(range(len(samples)))
    random.shuffle(order)
    shuffled = sample(logits[order], [samples[row] for row in order])
    for position, row in enumerate(order):
        assert together[row] == shuffled[position] == sample(logits[row : row + 1], [samples[row]])[0]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_frequencies_follow_the_distribution(params: dict[str, Any]) -> None:
    """Pearson's chi-square over 8,000 tokens of one seed: only the index moves."""
    num_draws = 8_000
    logits = random_logits(1)
    rows = sample(logits.expand(num_draws, -1), [make(index, seed=42, **params) for index in range(num_draws)])
    counts = Counter(row.token_ids[0] for row in rows)
    probs = reference_probs(logits[0].tolist(), make(**params))
    assert all(probs[token_id] > 0 for token_id in counts)
    cells = [(counts[token_id], num_draws * prob) for token_id, prob in enumerate(probs) if num_draws * prob >= 5]
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    assert statistic < len(cells) + 4 * math.sqrt(2 * len(cells))


def test_tokens_depend_on_the_seed() -> None:
    logits = random_logits(64, vocab=1000)

    def draw(seed: int) -> list[RowOutput]:
        return sample(logits, [make(index, seed=seed) for index in range(64)])

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0, 3.0]])
    assert sample(logits, [make(temperature=0.0)])[0].token_ids == (1,)
    assert (
        sample(logits.expand(50, -1), [make(index, top_k=1) for index in range(50)]) == [RowOutput(token_ids=(1,))] * 50
    )
    two = {row.token_ids[0] for row in sample(logits.expand(50, -1), [make(index, top_k=2) for index in range(50)])}
    assert two == {1, 2}


@pytest.mark.parametrize("temperature", [1e-300, 1e-9])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(8)
    tokens = [row.token_ids[0] for row in sample(logits, [make(index, temperature=temperature) for index in range(8)])]
    assert tokens == logits.argmax(dim=-1).tolist()


def test_top_p_finds_its_mass_beyond_the_first_thousand_tokens() -> None:
    """A flat distribution over 5,000 tokens: the nucleus of 0.8999 is its first 4,500."""
    draws = sample(torch.zeros(500, 5000), [make(index, top_p=0.8999) for index in range(500)])
    tokens = [token_id for row in draws for token_id in row.token_ids]
    assert max(tokens) < 4500
    assert max(tokens) > 4300


def test_masked_rows_obey_masks_and_free_rows_do_not_change() -> None:
    """Bans and bias notwithstanding; and the way of the device leaves the same logits."""
    logits, vocab = random_logits(4, vocab=70), 70
    allowed = {1: [0, 31, 32, 69], 3: [64]}
    masks = {}
    for row, ids in allowed.items():
        bits = np.zeros(96, dtype=np.uint8)
        bits[[*ids, 70, 95]] = 1  # beyond the vocabulary: nothing
        masks[row] = np.packbits(bits, bitorder="little").view(np.int32)
    bound: dict[str, Any] = {"grammar": "start: /x/", "logit_bias": ((5, 100.0),)}
    samples = [make(temperature=0.0), make(temperature=1.0, seed=3, **bound)]
    samples += [make(temperature=1.0, seed=4), make(temperature=0.0, ban=[64], **bound)]
    tokens = [row.token_ids[0] for row in begin(logits, samples, None, masks).fetch()]
    free = [row.token_ids[0] for row in sample(logits[[0, 2]], [samples[0], samples[2]])]
    assert tokens[::2] == free
    assert tokens[1] in allowed[1]
    assert tokens[3] == 64
    on_host, on_device = logits.clone(), logits.clone()
    _mask(on_host, masks)
    _mask_on_device(on_device, masks)
    assert torch.equal(on_host, on_device)
    assert on_host.isfinite().sum(dim=1).tolist() == [vocab, 4, vocab, 1]


def test_the_input_is_left_alone() -> None:
    logits = random_logits(2)
    before = logits.clone()
    sample(logits, [make(ban=[1], logit_bias=((2, 5.0),), min_p=0.2), make(output=[1], presence_penalty=1.0, top_k=3)])
    assert torch.equal(logits, before)


@given(
    outputs=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), min_size=1, max_size=4),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    frequency=st.sampled_from([0.0, 0.37]),
    presence=st.sampled_from([0.0, -0.6]),
)
def test_a_token_on_the_device_is_penalised_bit_by_bit(
    outputs: list[list[int]], repetition: float, frequency: float, presence: float
) -> None:
    penalties: dict[str, Any] = {
        "repetition_penalty": repetition,
        "frequency_penalty": frequency,
        "presence_penalty": presence,
    }
    logits = random_logits(len(outputs))
    complete, partly, latest = logits.clone(), logits.clone(), []
    for row, output in enumerate(outputs):
        latest.append(output[-1] if row % 2 == 0 else NONE)
    penalise(complete, [make(prompt=[1, 2], output=output, **penalties) for output in outputs], None)
    told = [output if place == NONE else output[:-1] for output, place in zip(outputs, latest, strict=True)]
    samples = [make(prompt=[1, 2], output=output, **penalties) for output in told]
    penalise(partly, samples, torch.tensor(latest))
    assert torch.equal(complete, partly)


def test_logprobs_are_the_models_own() -> None:
    """Before bias, penalties, temperature and filters; best first; the chosen token although it is not among them."""
    logits = random_logits(3)
    expected = torch.log_softmax(logits, dim=-1)
    best = int(logits[0].argmax())
    rows = sample(
        logits,
        [
            make(temperature=0.0, ban=[best], logprobs=2),
            make(temperature=0.0, logprobs=0),
            make(temperature=0.0),
        ],
    )
    (first,), (second,) = rows[0].logprobs, rows[1].logprobs
    assert first is not None
    assert second is not None
    assert rows[0].token_ids[0] != best
    assert first.chosen.token_id == rows[0].token_ids[0]
    assert first.chosen.logprob == pytest.approx(float(expected[0, first.chosen.token_id]), abs=1e-6)
    values, ids = expected[0].topk(2)
    assert [top.token_id for top in first.top] == ids.tolist()
    assert [top.logprob for top in first.top] == pytest.approx(values.tolist(), abs=1e-6)
    assert second.top == ()
    assert rows[2].logprobs == ()


def test_labels_of_a_row_come_behind_its_best() -> None:
    logits = random_logits(3)
    expected = torch.log_softmax(logits, dim=-1)
    rows = sample(
        logits, [make(logprobs=1, label_token_ids=(7,)), make(logprobs=0), make(logprobs=0, label_token_ids=(4, 3))]
    )
    best = int(logits[0].argmax())
    for row, wanted in enumerate(([best, 7], [], [4, 3])):
        top = rows[row].logprobs[0].top
        assert [entry.token_id for entry in top] == wanted
        assert [entry.logprob for entry in top] == pytest.approx(expected[row, wanted].tolist())


def test_equal_logprobs_are_listed_by_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0]])
    (scored,) = score(logits, [3], [4])
    assert [top.token_id for top in scored.top] == [1, 4, 0, 2]
    assert scored.chosen.token_id == 3
    ranks = [entry.rank for entry in score(logits.expand(5, 5), range(5), [0] * 5)]
    assert ranks == [3, 1, 4, 5, 2], "whether they are listed or not"


def test_more_logprobs_than_tokens() -> None:
    (scored,) = score(random_logits(1), [0], [VOCAB + 5])
    assert len(scored.top) == VOCAB
