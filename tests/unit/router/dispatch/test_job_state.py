"""The journal: what a job needs to go on anywhere, and what of a second telling is new."""

from __future__ import annotations

import pytest

from kvtransfer.hashing import chain_hashes
from protos.values import FinishReason, SequenceUpdate
from router.dispatch.job_state import JobState
from tests.unit.router.fake_cluster import PROMPT, job
from tests.unit.router.fake_worker import logprob


def update(*token_ids: int, prompt: int = 0, said: int = 0, cached: int = 0) -> SequenceUpdate:
    """An update with `token_ids`, with the prompt's log-probabilities from position `said` to `prompt`."""
    return SequenceUpdate(
        request_id="r",
        token_ids=token_ids,
        prompt_logprobs=tuple(logprob(token) for token in PROMPT[1:][said:prompt]),
        finish_reason=FinishReason.PREFILLED if token_ids else None,
        num_cached_tokens=cached,
    )


def test_repeated_prompt_logprobs_continue_where_they_stopped() -> None:
    journal = JobState(job(prompt_logprobs=0), now=0.0)
    journal.next_attempt()
    told = [*journal.append(update(prompt=10)).prompt_logprobs]
    journal.next_attempt()
    told += journal.append(update(prompt=6)).prompt_logprobs
    told += journal.append(update(prompt=20, said=6)).prompt_logprobs
    told += journal.append(update(5, prompt=29, said=20)).prompt_logprobs
    assert told == [logprob(token) for token in PROMPT[1:]]


def test_a_move_under_way_is_no_second_telling() -> None:
    journal = JobState(job(prompt_logprobs=0), now=0.0)
    assert journal.next_attempt() == ("r.1", 1)
    told = [*journal.append(update(prompt=10)).prompt_logprobs]
    assert journal.next_id() == ("r.2", 2)
    delta = journal.append(update(5, prompt=29, said=10, cached=16))
    told += delta.prompt_logprobs
    assert told == [logprob(token) for token in PROMPT[1:]]
    assert delta.num_cached_tokens == 16
    assert journal.next_attempt() == ("r.3", 3)


def test_an_attempt_continues_after_the_clients_tokens() -> None:
    journal = JobState(job(prompt_logprobs=0, logprobs=2), now=0.0)
    assert journal.next_attempt() == ("r.1", 1)
    assert journal.request("r.1").sampling.prompt_logprobs == 0
    delta = journal.append(update(5, cached=16))
    assert (delta.token_ids, delta.finish_reason, delta.num_cached_tokens) == ((5,), None, 16)
    assert journal.next_attempt() == ("r.2", 2)
    request = journal.request("r.2", more=(6,))
    assert (request.prompt_ids, request.output_ids) == (PROMPT, (5, 6))
    assert (request.sampling.prompt_logprobs, request.sampling.logprobs) == (None, 2)
    assert journal.append(update(6, cached=24)).num_cached_tokens == 0
    assert journal.token_ids == (*PROMPT, 5, 6)


def test_waiting_is_told_with_the_first_token_only() -> None:
    journal = JobState(job(), now=10.0)
    journal.read_since_s = 10.5
    assert [journal.append(update(token)).queue_s for token in (1, 2)] == [0.5, 0.0]


def test_hashes_cover_emitted_tokens() -> None:
    journal = JobState(job(prompt_ids=PROMPT[:15]), now=0.0)
    assert journal.hashes(8) == chain_hashes(PROMPT[:15], 8)
    journal.append(update(9))
    assert journal.hashes(8) == chain_hashes((*PROMPT[:15], 9), 8)
    assert journal.hashes(4) == chain_hashes((*PROMPT[:15], 9), 4)


@pytest.mark.parametrize(("num_attempts", "told"), [(1, 20), (2, 8)])
def test_blocks_of_a_failed_attempt_are_no_cache_hit(num_attempts: int, told: int) -> None:
    journal = JobState(job(), now=0.0)
    for num_cached in (8, 28)[:num_attempts]:  # the second time, the first attempt's own blocks are among them
        journal.know_cached(num_cached)
        journal.next_attempt()
    assert journal.append(update(1, cached=20)).num_cached_tokens == told
