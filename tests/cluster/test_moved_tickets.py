"""Whichever worker of a pair dies or stops while a sequence moves from one to the other, or a prefix is pulled: the
other one continues with what it has, is idle soon and holds nothing. As tests/cluster/test_ticket_states.py has it for
prompts that are pushed; the lane is the same."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvtransfer.lane_rules import LaneConfig
from kvtransfer.ticket_ledger import TicketState
from protos.values import SamplingParams, Ticket
from tests.cluster.half import Distant, Half, until
from tests.cluster.test_ticket_states import HASTY, PATIENT
from tests.unit.decode_pool.pair import DECODE, DECODE_WEIGHT, PREFILL, PREFILL_WEIGHT, prompt
from tests.unit.decode_pool.test_moving import made_by

pytestmark = pytest.mark.cluster

PROMPT = prompt(12)
PARAMS = SamplingParams(temperature=0.0, max_tokens=6)
SIGNALS = pytest.mark.parametrize(
    ("blow", "lanes"), [(signal.SIGKILL, PATIENT), (signal.SIGSTOP, HASTY)], ids=["killed", "stopped"]
)


def answer(*weights: int) -> tuple[int, ...]:
    return made_by(weights, PROMPT, PARAMS)


@pytest.fixture
def here(lanes: LaneConfig, request: pytest.FixtureRequest) -> Iterator[Half]:
    half = Half(request.param, replace(lanes, transport="shm"))
    yield half
    half.close()


@pytest.fixture
def there(lanes: LaneConfig, request: pytest.FixtureRequest) -> Iterator[Distant]:
    distant = Distant(request.param, replace(lanes, transport="shm"))
    yield distant
    distant.end()


FROM_THERE = pytest.mark.parametrize(("here", "there"), [("decode", "prefill")], indirect=True)
TO_THERE = pytest.mark.parametrize(("here", "there"), [("prefill", "decode")], indirect=True)


def begin_to_move(source: Half | Distant, destination: Half | Distant) -> Ticket:
    """The reader writes its answer itself, and hands it on after some tokens."""
    source.submit("r", PROMPT)
    while len(source.tokens("r")) < 2:
        source.step()
    tokens = PROMPT + source.tokens("r")
    ticket: Ticket = destination.reserve("r", tokens[:-1], PREFILL, len(tokens) + 8)
    source.open(ticket)
    until(lambda: source.lanes() == ["open"] and destination.lanes() == ["open"])
    source.move("r", ticket)
    source.step()

    def sending() -> bool:
        destination.step()
        return destination.state("r") == "sending"

    until(sending)
    return ticket


def has_moved(source: Half | Distant, destination: Half | Distant) -> bool:
    source.step()
    destination.step()
    return bool(source.has_moved("r"))


@SIGNALS
@FROM_THERE
@pytest.mark.parametrize("moved", [False, True])
def test_a_sequence_survives_the_loss_of_its_old_worker(
    here: Half, there: Distant, blow: signal.Signals, moved: bool
) -> None:
    ticket = begin_to_move(there, here)
    if moved:
        until(lambda: has_moved(there, here))
        tokens: tuple[int, ...] = there.tokens("r")
        here.submit("r", PROMPT, tokens, ticket)
        until(lambda: here.step() or here.state("r") is TicketState.ADOPTED)
    there.signal(blow)
    if moved:
        until(lambda: here.step() or not here.side.engine.has_work())
        assert tokens + here.tokens("r") == answer(
            *[PREFILL_WEIGHT] * len(tokens), *[DECODE_WEIGHT] * (6 - len(tokens))
        )
    else:
        until(lambda: here.step() or here.state("r") is TicketState.ABORTED)
    here.assert_idle()


@SIGNALS
@TO_THERE
def test_a_sequence_stays_if_its_new_worker_is_lost(here: Half, there: Distant, blow: signal.Signals) -> None:
    begin_to_move(here, there)
    there.signal(blow)
    until(lambda: here.step() or not here.side.engine.has_work())
    assert here.has_moved("r") or here.tokens("r") == answer(*[PREFILL_WEIGHT] * 6)
    here.assert_idle()


def begin_to_pull(reader: Half | Distant, holder: Half | Distant) -> Ticket:
    """The writer has the prompt cached; the reader reserves blocks for the missing part."""
    holder.submit("before", PROMPT)
    while len(holder.tokens("before")) < 6:
        holder.step()
    ticket: Ticket = reader.reserve("r/pull", PROMPT[:8], DECODE)
    holder.open(ticket)
    until(lambda: reader.lanes() == ["open"] and holder.lanes() == ["open"])
    return ticket


@SIGNALS
@TO_THERE
@pytest.mark.parametrize("shared", [False, True])
def test_a_pull_from_a_lost_worker_is_computed(here: Half, there: Distant, blow: signal.Signals, shared: bool) -> None:
    pull = begin_to_pull(here, there)
    if shared:
        there.share(pull, PROMPT[:8])
        until(lambda: there.step() or here.step() or here.state("r/pull") is TicketState.ARRIVED)
    there.signal(blow)
    here.submit("r", PROMPT, (), None, pull)
    until(lambda: here.step() or not here.side.engine.has_work())
    assert here.tokens("r") == answer(*[PREFILL_WEIGHT] * 6)
    assert here.side.cached["r"] == 8 * shared
    here.assert_idle()


@SIGNALS
@FROM_THERE
def test_blocks_held_for_a_lost_reader_are_released(here: Half, there: Distant, blow: signal.Signals) -> None:
    pull = begin_to_pull(there, here)
    there.signal(blow)
    here.share(pull, PROMPT[:8])
    until(lambda: here.step() or here.lanes() != ["open"])
    here.assert_idle()
