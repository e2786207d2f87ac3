"""A conversation is told from others by the first block that few share."""

from __future__ import annotations

import random

from protos.chain import Chain
from router.dispatch.sessions import GROWTH, LEAST, Sessions


def chain(*numbers: int) -> Chain:
    """Of blocks; one with a number stands after the same blocks always."""
    return Chain.of(number.to_bytes(16, "big") for number in numbers)


def own(conversation: int, count: int) -> tuple[int, ...]:
    return tuple(conversation * 10_000 + place for place in range(count))


SYSTEM = tuple(range(1, 14))


def test_conversations_that_begin_with_one_system_prompt_are_sessions_of_their_own() -> None:
    sessions, turns = Sessions(), random.Random(0)
    asked = [(conversation, turn) for conversation in range(10, 110) for turn in range(1, 6)]
    turns.shuffle(asked)
    asked.sort(key=lambda one: one[1])
    found: dict[int, list[str]] = {}
    for conversation, turn in asked:
        session = sessions.of(chain(*SYSTEM, *own(conversation, 3 * turn)), num_workers=4)
        found.setdefault(conversation, []).append(session)
    settled = {conversation: set(those[1:]) for conversation, those in found.items()}
    assert all(len(those) == 1 for those in settled.values())
    assert len({session for those in settled.values() for session in those}) == len(settled)


def test_many_questions_about_few_documents_are_a_session_a_document() -> None:
    """All of a document's requests are no more than a worker can have."""
    sessions, chance = Sessions(), random.Random(1)
    documents = [own(number, 60) for number in range(10, 50)]
    found: dict[int, set[str]] = {}
    for number in range(1000):
        document = chance.randrange(len(documents))
        session = sessions.of(chain(*documents[document], *own(1000 + number, 2)), num_workers=4)
        found.setdefault(document, set()).add(session)
    assert [len(those) for those in found.values()] == [1] * len(documents)


def test_a_lone_conversation_stays_one_session_however_long_it_is() -> None:
    sessions = Sessions()
    assert len({sessions.of(chain(*own(7, turn)), num_workers=8) for turn in range(1, 200)}) == 1


def test_a_prompt_that_is_nothing_but_what_all_share_has_no_session() -> None:
    sessions = Sessions()
    for conversation in range(10, 10 + 4 * LEAST):
        sessions.of(chain(*SYSTEM, *own(conversation, 5)), num_workers=4)
    assert sessions.of(chain(*SYSTEM), num_workers=4) == ""
    assert sessions.of(chain(), num_workers=4) == ""


def test_a_few_requests_that_begin_alike_are_one_session() -> None:
    """There is no saying yet whether they are too many for one worker."""
    sessions = Sessions()
    assert len({sessions.of(chain(1, *own(number, 3)), num_workers=4) for number in range(10, 10 + LEAST)}) == 1


def test_what_is_remembered_is_bounded_and_what_is_old_is_forgotten() -> None:
    sessions = Sessions(generation=50)
    for number in range(10, 1010):
        sessions.of(chain(*SYSTEM, *own(number, 100)), num_workers=4)
    assert sessions.num_blocks <= 2 * (50 * GROWTH + len(SYSTEM))
    for number in range(2000, 2150):
        sessions.of(chain(*own(number, 2)), num_workers=4)
    first = {sessions.of(chain(*SYSTEM, *own(number, 2)), num_workers=4) for number in range(3000, 3000 + LEAST)}
    assert len(first) == 1
