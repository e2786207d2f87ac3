"""More sequences than batch slots: a short answer does not wait until the long ones before it have ended."""

from __future__ import annotations

import pytest

from tests.unit.workers.harness import ToyEngine, ask, by_hand

LONG = 60
TURN = 4


def seated(toy: ToyEngine) -> set[str]:
    return {update.request_id for update in toy.step() if update.token_ids}


@pytest.mark.parametrize("depth", [0, 1])
def test_a_short_answer_waits_for_one_turn_only(depth: int) -> None:
    toy = ToyEngine(max_num_seqs=2, time_slice_s=TURN, depth=depth)
    toy.submit(*(ask(f"long{n}", [n, 7], max_tokens=LONG) for n in range(3)))
    toy.step(2)
    toy.submit(ask("short", [9], max_tokens=2))
    for _ in range(4 * TURN):
        toy.step()
        if toy.answers["short"].finish_reason is not None:
            break
    assert toy.answers["short"].token_ids == by_hand([9], 2)
    assert all(toy.answers[f"long{n}"].finish_reason is None for n in range(3))
    answers = toy.finish()
    assert {name: output.token_ids for name, output in answers.items() if name != "short"} == {
        f"long{n}": by_hand([n, 7], LONG) for n in range(3)
    }
    assert toy.scheduler.num_preemptions == 0, "nothing is computed twice"


def test_every_sequence_advances_within_its_turns() -> None:
    toy = ToyEngine(num_blocks=1024, max_num_seqs=4, time_slice_s=TURN)
    names = {f"r{n}" for n in range(16)}
    toy.submit(*(ask(name, [len(name), *name.encode()], max_tokens=LONG) for name in sorted(names)))
    for _ in range(3):
        told: set[str] = set()
        for _ in range(2 * TURN * len(names) // 4):
            told |= seated(toy)
        assert told == names
    toy.finish()


def test_no_sequence_is_paused_early_or_without_need() -> None:
    toy = ToyEngine(max_num_seqs=2, time_slice_s=TURN)
    toy.submit(*(ask(f"r{n}", [n], max_tokens=LONG) for n in range(2)))
    for _ in range(3 * TURN):
        assert seated(toy) == {"r0", "r1"}
    toy.submit(ask("late", [9], max_tokens=LONG))
    for _ in range(TURN - 1):
        assert seated(toy) == {"r0", "r1"}
    assert "late" in seated(toy) | seated(toy)
    toy.finish()


def test_a_lower_priority_gets_no_turn() -> None:
    toy = ToyEngine(max_num_seqs=1, time_slice_s=TURN, priority_head_start_s=1000.0)
    toy.submit(ask("urgent", [1], max_tokens=LONG, priority=1))
    toy.step()
    toy.submit(ask("later", [2], max_tokens=2))
    while toy.answers["urgent"].finish_reason is None:
        assert seated(toy) == {"urgent"}
    toy.finish()


def test_no_sequence_is_paused_while_blocks_are_short() -> None:
    toy = ToyEngine(num_blocks=8, max_num_seqs=2, time_slice_s=TURN)  # of 4 tokens
    toy.submit(ask("r0", range(12), max_tokens=4), ask("r1", range(20, 32), max_tokens=4))
    toy.step()
    toy.submit(ask("r2", range(40, 52), max_tokens=4))
    answers = toy.finish()
    assert answers["r2"].token_ids == by_hand(range(40, 52), 4)
    assert toy.scheduler.num_preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_unread_answers_give_their_slots_and_get_them_back(depth: int) -> None:
    toy = ToyEngine(max_num_seqs=2, depth=depth)
    toy.submit(*(ask(f"r{n}", [n, 7], max_tokens=LONG) for n in range(2)))
    toy.step(3)
    for name in ("r0", "r1", "unknown"):
        toy.scheduler.set_unread(name, True, toy.now)
    assert seated(toy) == {"r0", "r1"}, "nobody waits"
    toy.submit(*(ask(f"new{n}", [n], max_tokens=8) for n in range(3)))
    toy.step(3 + depth)
    assert seated(toy) == {"new0", "new1"}
    toy.scheduler.set_unread("r1", False, toy.now)
    while toy.answers["new0"].finish_reason is None:
        toy.step()
    toy.step(depth)
    assert seated(toy) == {"new2", "r1"}, "the client of r1 reads on, that of r0 does not"
    answers = toy.finish()
    assert {name: answer.token_ids for name, answer in answers.items()} == {
        **{f"r{n}": by_hand([n, 7], LONG) for n in range(2)},
        **{f"new{n}": by_hand([n], 8) for n in range(3)},
    }
    assert toy.scheduler.num_preemptions == 0, "nothing is computed twice"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("slots", [2, 8])
def test_unread_answers_give_blocks_to_requests_that_lack_some(depth: int, slots: int) -> None:
    toy = ToyEngine(num_blocks=20, max_num_seqs=slots, depth=depth)  # of 4 tokens
    toy.submit(*(ask(f"r{n}", [n, *range(20)], max_tokens=24) for n in range(2)))
    toy.step(3)
    for name in ("r0", "r1"):
        toy.scheduler.set_unread(name, True, toy.now)
    toy.submit(ask("new", range(50, 96), max_tokens=8))
    toy.step(8)
    assert toy.answers["new"].token_ids, "it waits for blocks that nobody reads from"
    answers = toy.finish()
    assert answers["new"].token_ids == by_hand(range(50, 96), 8)
    assert [answers[f"r{n}"].token_ids for n in range(2)] == [by_hand([n, *range(20)], 24) for n in range(2)]


def test_unread_answers_alone_end_where_blocks_are_short() -> None:
    toy = ToyEngine(num_blocks=16, max_num_seqs=4, time_slice_s=TURN)
    toy.submit(*(ask(f"r{n}", [n, *range(9)], max_tokens=30) for n in range(4)))
    toy.step(2)
    for n in range(4):
        toy.scheduler.set_unread(f"r{n}", True, toy.now)
    answers = toy.finish()
    assert [answers[f"r{n}"].token_ids for n in range(4)] == [by_hand([n, *range(9)], 30) for n in range(4)]
