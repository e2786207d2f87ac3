"""Whichever worker of a pair dies or stops, wherever their ticket stands: the other one is idle soon and holds nothing.

A ticket's lease is longer than these tests, so it is not what frees the blocks.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from kvtransfer.config import Preference
from kvtransfer.ledger import TicketState
from protos.values import Ticket
from tests.cluster.half import Distant, Half, until
from tests.unit.decode_pool.pair import expected, prompt

pytestmark = pytest.mark.cluster

PROMPT = prompt(12)  # three blocks, a step and a chunk each
FIRST = expected(PROMPT, 1)
STALL_S = 0.5
SIGNALS = pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
STATES = pytest.mark.parametrize("reached", ["reserved", "sending", "arrived", "adopted"])


@pytest.fixture(params=["collective", "shm"])
def over(request: pytest.FixtureRequest) -> Preference:
    preference: Preference = request.param
    return preference


@pytest.fixture
def decode(over: Preference) -> Iterator[Half]:
    """The survivor that receives."""
    half = Half("decode", over, STALL_S)
    yield half
    half.close()


@pytest.fixture
def prefill(over: Preference) -> Iterator[Half]:
    """The survivor that sends."""
    half = Half("prefill", over, STALL_S)
    yield half
    half.close()


@pytest.fixture
def other(over: Preference, request: pytest.FixtureRequest) -> Iterator[Distant]:
    distant = Distant(request.param, over, STALL_S)
    yield distant
    distant.end()


def bring_to(reached: str, prefill: Half | Distant, decode: Half | Distant) -> Ticket:
    """One of the two is here, the other one there."""
    ticket: Ticket = decode.reserve("r", PROMPT)
    prefill.open(ticket)
    until(lambda: prefill.lanes() == ["open"] and decode.lanes() == ["open"])
    if reached == "reserved":
        return ticket
    prefill.submit("r", PROMPT, (), ticket)
    for _ in range(2 if reached == "sending" else 5):
        prefill.step()

    def come() -> bool:
        decode.step()
        return decode.state("r") == ("sending" if reached == "sending" else "arrived")

    until(come)
    if reached == "adopted":
        decode.submit("r", PROMPT, FIRST, ticket)
        decode.step()
        assert decode.state("r") is TicketState.ADOPTED
    return ticket


@SIGNALS
@STATES
@pytest.mark.parametrize("other", ["prefill"], indirect=True)
def test_the_receiver_of_a_ticket_whose_sender_goes(
    decode: Half, other: Distant, reached: str, blow: signal.Signals
) -> None:
    ticket = bring_to(reached, other, decode)
    other.signal(blow)

    waits = reached in ("reserved", "sending")

    def heard() -> bool:
        decode.step()
        return decode.state("r") is TicketState.ABORTED if waits else decode.lanes() != ["open"]

    until(heard)
    if not waits:
        if reached == "arrived":
            decode.submit("r", PROMPT, FIRST, ticket)
        while decode.side.engine.has_work():
            decode.step()
        assert FIRST + decode.side.tokens["r"] == expected(PROMPT), "what had arrived needs its sender no more"
    decode.assert_idle()


@SIGNALS
@STATES
@pytest.mark.parametrize("other", ["decode"], indirect=True)
def test_the_sender_of_a_ticket_whose_receiver_goes(
    prefill: Half, other: Distant, reached: str, blow: signal.Signals
) -> None:
    ticket = bring_to(reached, prefill, other)
    other.signal(blow)
    if reached == "reserved":
        prefill.submit("r", PROMPT, (), ticket)

    def over_and_done() -> bool:
        prefill.step()
        return prefill.lanes() != ["open"] and not prefill.side.engine.has_work()

    until(over_and_done)
    prefill.assert_idle()
