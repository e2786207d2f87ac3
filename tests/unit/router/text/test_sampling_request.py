"""A request becomes jobs, or an error that names the value, the range and the parameter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import ContextLengthExceeded, InvalidRequest
from router.text.model_card import ModelCard
from router.text.sampling_request import MAX_CHOICES, MAX_STOPS, SamplingRequest, TextRequest, make_text_request

CARD = ModelCard(
    name="m",
    max_model_len=100,
    vocab_size=50,
    eos_token_ids=frozenset({2, 3}),
    temperature=0.6,
    top_p=0.9,
    top_k=20,
    repetition_penalty=1.1,
)
PROMPT = tuple(range(10))


def asking(prompts: list[tuple[int, ...]] | None = None, default: int | None = 16, **asked: Any) -> TextRequest:
    return make_text_request(
        SamplingRequest(**asked), prompts or [PROMPT], CARD, request_id="r", default_max_tokens=default
    )


def test_the_models_defaults_fill_missing_parameters() -> None:
    sampling = asking().jobs[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.6, 0.9, 20, 1.1)
    assert (sampling.min_p, sampling.presence_penalty, sampling.logprobs) == (0.0, 0.0, None)


def test_the_clients_parameters_win() -> None:
    sampling = asking(temperature=0.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, min_p=0.5).jobs[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.0, 1.0, 0, 1.0)
    assert sampling.min_p == 0.5


def test_top_p_zero_leaves_the_likeliest_token() -> None:
    sampling = asking(top_p=0.0).jobs[0].sampling
    assert (sampling.top_p, sampling.top_k) == (1.0, 1)


@pytest.mark.parametrize(
    ("param", "value", "allowed"),
    [
        ("temperature", 2.5, "between 0 and 2"),
        ("temperature", float("nan"), "between 0 and 2"),
        ("top_p", -0.1, "between 0 and 1"),
        ("top_k", -2, "between -1 and"),
        ("min_p", 1.5, "between 0 and 1"),
        ("repetition_penalty", 0.0, "between 0.01 and 100"),
        ("presence_penalty", 3.0, "between -2 and 2"),
        ("frequency_penalty", -3.0, "between -2 and 2"),
        ("prompt_logprobs", -1, "between 0 and 20 (-1, vLLM's word for the whole vocabulary, is not offered)"),
        ("n", 0, "between 1 and 128"),
        ("seed", 2**64, "between"),
        ("logprobs", 21, "between 0 and 20"),
        ("min_tokens", -1, "between 0"),
        ("max_tokens", -5, "between 1"),
        ("stop_token_ids", (50,), "between 0 and 49"),
        ("stop_token_ids", (5,) * 129, "at most 128 entries"),
        ("logit_bias", ((50, 1.0),), "between 0 and 49"),
        ("logit_bias", ((5, 101.0),), "between -100 and 100"),
        ("stop", ("",), "1 to 512"),
        ("stop", ("x",) * (MAX_STOPS + 1), f"at most {MAX_STOPS}"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_range(param: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asking(**{param: value})
    assert refused.value.param == param
    assert param in refused.value.message
    assert allowed in refused.value.message


def test_the_error_uses_the_clients_name() -> None:
    with pytest.raises(InvalidRequest, match="'top_logprobs' has the value 30") as refused:
        asking(logprobs=30, names={"logprobs": "top_logprobs"})
    assert refused.value.param == "top_logprobs"


def test_prompt_and_answer_must_fit() -> None:
    assert asking(max_tokens=90).jobs[0].sampling.max_tokens == 90
    with pytest.raises(ContextLengthExceeded) as refused:
        asking(max_tokens=91)
    assert "maximum context length is 100 tokens" in refused.value.message
    assert "101 (10 in the prompt, 91 in the completion)" in refused.value.message
    assert refused.value.param == "max_tokens", "the prompt alone would fit"


def test_a_prompt_must_leave_room_for_one_token() -> None:
    assert asking([PROMPT * 9 + PROMPT[:9]]).jobs[0].sampling.max_tokens == 1
    with pytest.raises(ContextLengthExceeded, match="resulted in 100 tokens"):
        asking([PROMPT * 10])


def test_without_a_limit_the_context_is_one() -> None:
    assert asking(default=None).jobs[0].sampling.max_tokens == 90
    assert asking([PROMPT * 9]).jobs[0].sampling.max_tokens == 10, "the default of 16 does not fit"


def test_min_tokens_must_be_reachable() -> None:
    with pytest.raises(InvalidRequest, match="at most max_tokens, which is 4"):
        asking(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(("prompt", "told"), [((), "is empty"), ((50,), "between 0 and 49"), ((-1,), "between 0")])
def test_a_prompt_is_made_of_known_tokens(prompt: tuple[int, ...], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        asking([prompt])


def test_there_is_a_limit_to_choices() -> None:
    assert len(asking([PROMPT] * (MAX_CHOICES // 128), n=128).jobs) == MAX_CHOICES
    with pytest.raises(InvalidRequest, match=f"1 to {MAX_CHOICES}"):
        asking([PROMPT] * (MAX_CHOICES // 128 + 1), n=128)


@given(seed=st.integers(-(2**63), 2**63 - 1), n=st.integers(1, 5))
def test_choices_draw_apart_and_the_first_equals_n_1(seed: int, n: int) -> None:
    seeds = [job.sampling.seed for job in asking([PROMPT, PROMPT], seed=seed, n=n).jobs]
    assert len(set(seeds)) == n
    assert seeds[:n] == seeds[n:], "a prompt's answers do not depend on its neighbours"
    assert seeds[0] == asking(seed=seed).jobs[0].sampling.seed
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_missing_seeds_are_drawn() -> None:
    assert asking().jobs[0].sampling.seed != asking().jobs[0].sampling.seed


def test_jobs_have_names_of_their_own_and_a_group() -> None:
    ask = asking([PROMPT, PROMPT[:5]], n=2, cache_salt="tenant", priority=3)
    assert [job.request_id for job in ask.jobs] == ["r-0", "r-1", "r-2", "r-3"]
    assert {(job.group_id, job.cache_salt, job.priority) for job in ask.jobs} == {("r", b"tenant", 3)}
    assert ask.prompts == (PROMPT, PROMPT[:5])


def test_no_answer_wanted_is_one_token_thrown_away() -> None:
    ask = asking(silent=True)
    assert ask.silent
    assert ask.jobs[0].sampling.max_tokens == 1


@pytest.mark.parametrize("number", [0, -1])
def test_an_answer_has_a_token(number: int) -> None:
    with pytest.raises(InvalidRequest, match=f"'max_tokens' has the value {number}: it must be between 1 and"):
        asking(max_tokens=number)


def test_end_tokens_stop_unless_they_are_ignored() -> None:
    assert asking(stop_token_ids=(7,)).stop_token_ids == {2, 3, 7}
    assert asking(stop_token_ids=(7,), ignore_eos=True).stop_token_ids == {7}
