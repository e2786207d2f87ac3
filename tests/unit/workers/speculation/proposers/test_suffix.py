"""Drafts from past answers: the more frequent way on counts, memory is bounded, and tenants do not meet."""

from __future__ import annotations

from random import Random

from tests.contract.test_proposers import Sequence, draft
from workers.speculation.proposers.suffix import BYTES_A_TOKEN, MIN_MATCH, WAITING_SHARE, SuffixProposer


def learnt(proposer: SuffixProposer, *answers: tuple[int, ...], salt: bytes = b"") -> None:
    """Answers that have ended, all added by later queries."""
    for number, answer in enumerate(answers):
        proposer.begin(Sequence(request_id=f"past-{number}", prompt_ids=(0,), cache_salt=salt))
        draft(proposer, f"past-{number}")
        proposer._sequences[f"past-{number}"].output_ids.extend(answer)
        proposer.end(f"past-{number}")
    proposer.begin(Sequence(request_id="asks", prompt_ids=(0,), cache_salt=salt))
    while proposer._ended:
        draft(proposer, "asks")
    proposer.end("asks")


def drafted(proposer: SuffixProposer, *last: int, salt: bytes = b"", max_drafts: int = 6) -> tuple[int, ...]:
    proposer.begin(Sequence(request_id="new", prompt_ids=(99, 98), output_ids=list(last), cache_salt=salt))
    ids = draft(proposer, "new", max_drafts).token_ids
    proposer._queried.discard("new")  # it is not learnt
    proposer.end("new")
    return ids


def test_the_most_frequent_continuation_is_drafted() -> None:
    proposer = SuffixProposer()
    learnt(proposer, (1, 2, 3, 4, 5), (1, 2, 3, 7, 8), (9, 1, 2, 3, 4, 6))
    assert drafted(proposer, 1, 2, 3)[:1] == (4,)
    assert drafted(proposer, 2, 3, 7) == (8,)
    assert drafted(proposer, 3, 4, 9) == ()


def test_a_longer_match_counts_more_than_a_frequent_one() -> None:
    proposer = SuffixProposer()
    learnt(proposer, (1, 2, 3, 4), (1, 2, 3, 4), (8, 9, 1, 2, 3, 5))
    assert drafted(proposer, 7, 7, 1, 2, 3) == (4,)
    assert drafted(proposer, 8, 9, 1, 2, 3) == (5,)


def test_no_salt_reads_the_answers_of_another() -> None:
    proposer = SuffixProposer()
    learnt(proposer, (1, 2, 3, 4), salt=b"one")
    assert drafted(proposer, 1, 2, 3, salt=b"one") == (4,)
    assert drafted(proposer, 1, 2, 3, salt=b"two") == drafted(proposer, 1, 2, 3) == ()


def test_memory_is_bounded_and_the_oldest_answers_go_first() -> None:
    max_tokens = 200
    proposer, chance = SuffixProposer(max_tokens * BYTES_A_TOKEN), Random(0)
    answers = [tuple(chance.randrange(1000) for _ in range(40)) for _ in range(30)]
    for number, answer in enumerate(answers):
        learnt(proposer, answer, salt=bytes([number % 3]))
        assert proposer.num_tokens <= max_tokens
        total = sum(len(past.tokens) for past in proposer._past.values())
        keys = sum(len(past.latest) for past in proposer._past.values())
        assert total == proposer.num_tokens
        assert keys <= total
    assert drafted(proposer, *answers[-1][:MIN_MATCH], salt=bytes([29 % 3])) == answers[-1][3:9]
    assert drafted(proposer, *answers[0][:MIN_MATCH], salt=bytes([0])) == ()


def test_of_an_answer_beyond_the_bound_its_last_tokens_are_kept() -> None:
    proposer = SuffixProposer(50 * BYTES_A_TOKEN)
    learnt(proposer, tuple(range(100, 300)))
    assert proposer.num_tokens <= 50
    assert drafted(proposer, 290, 291, 292) == (293, 294, 295, 296, 297, 298)
    assert drafted(proposer, 100, 101, 102) == ()


def test_without_memory_nothing_is_kept() -> None:
    proposer = SuffixProposer(0)
    learnt(proposer, (1, 2, 3, 4, 5))
    assert (proposer.num_tokens, drafted(proposer, 1, 2, 3)) == (0, ())


def test_a_long_answer_is_added_in_parts() -> None:
    """No step waits for it."""
    proposer = SuffixProposer()
    proposer.begin(Sequence(request_id="long", prompt_ids=(0,)))
    draft(proposer, "long")
    proposer._sequences["long"].output_ids.extend(range(10, 2010))
    proposer.end("long")
    proposer.begin(Sequence(request_id="asks", prompt_ids=(0,)))
    sizes = list[int]()
    while not sizes or sizes[-1] < 2001:
        draft(proposer, "asks")
        sizes.append(proposer.num_tokens)
    assert max(b - a for a, b in zip([0, *sizes], sizes, strict=False)) <= 256


def test_answers_that_wait_to_be_added_are_bounded_too() -> None:
    """Many end at once, and none is added before the next query."""
    max_tokens = 400
    proposer, chance = SuffixProposer(max_tokens * BYTES_A_TOKEN), Random(0)
    for number in range(30):
        name = f"r{number}"
        proposer.begin(Sequence(request_id=name, prompt_ids=(0,)))
        draft(proposer, name)
        proposer._sequences[name].output_ids.extend(chance.randrange(1000) for _ in range(19))
    for number in range(30):
        proposer.end(f"r{number}")
        waiting = sum(len(output.token_ids) for output in proposer._ended)
        assert proposer.num_waiting == waiting <= max_tokens // WAITING_SHARE
    learnt(proposer)
    assert proposer.num_waiting == 0
    assert proposer.num_tokens == 40
