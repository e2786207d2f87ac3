"""Whichever worker of a pair dies or stops, wherever their ticket stands: the other one is idle soon and holds nothing.

A ticket's lease is longer than these tests, so it is not what frees the blocks. Nor is patience what finds out that a
process was killed: lanes have none to lose here (but for a sender over gloo), and beat as they do by default.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvtransfer.lane_rules import LaneConfig, Preference
from kvtransfer.ticket_ledger import TicketState
from protos.values import Ticket
from tests.cluster.half import Distant, Half, until
from tests.unit.decode_pool.pair import expected, prompt

pytestmark = pytest.mark.cluster

PROMPT = prompt(12)  # three blocks, a step and a chunk each
FIRST = expected(PROMPT, 1)
NEVER_S = 600.0
GLOO_S = 10.0
DEFAULT = LaneConfig()
PATIENT = replace(DEFAULT, stall_s=NEVER_S, connect_timeout_s=NEVER_S)
HASTY = LaneConfig(stall_s=2.0, heartbeat_s=0.1)  # not less: a busy machine keeps a thread waiting for half a second
SIGNALS = pytest.mark.parametrize(
    ("blow", "lanes"), [(signal.SIGKILL, PATIENT), (signal.SIGSTOP, HASTY)], ids=["killed", "stopped"]
)
STATES = pytest.mark.parametrize("reached", ["reserved", "sending", "arrived", "adopted"])


@pytest.fixture(params=["collective", "shm"])
def over(request: pytest.FixtureRequest) -> Preference:
    preference: Preference = request.param
    return preference


@pytest.fixture
def decode(over: Preference, lanes: LaneConfig) -> Iterator[Half]:
    """The survivor that receives."""
    half = Half("decode", replace(lanes, transport=over))
    yield half
    half.close()


@pytest.fixture
def prefill(over: Preference, lanes: LaneConfig) -> Iterator[Half]:
    """The survivor that sends. Under load, one in 65 gloo sends that begin while the connection ends is not notified,
    and waits for `stall_s`."""
    patience_s = min(lanes.stall_s, GLOO_S) if over == "collective" else lanes.stall_s
    half = Half("prefill", replace(lanes, transport=over, stall_s=patience_s))
    yield half
    half.close()


@pytest.fixture
def other(over: Preference, lanes: LaneConfig, request: pytest.FixtureRequest) -> Iterator[Distant]:
    distant = Distant(request.param, replace(lanes, transport=over))
    yield distant
    distant.end()


def bring_to(reached: str, prefill: Half | Distant, decode: Half | Distant) -> Ticket:
    """Brings the ticket to one state here and to another there."""
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
def test_a_receiver_whose_sender_is_lost(decode: Half, other: Distant, reached: str, blow: signal.Signals) -> None:
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
def test_a_sender_whose_receiver_is_lost(prefill: Half, other: Distant, reached: str, blow: signal.Signals) -> None:
    ticket = bring_to(reached, prefill, other)
    other.signal(blow)
    if reached == "reserved":
        prefill.submit("r", PROMPT, (), ticket)

    def over_and_done() -> bool:
        prefill.step()
        return prefill.lanes() != ["open"] and not prefill.side.engine.has_work()

    until(over_and_done)
    prefill.assert_idle()


@pytest.mark.parametrize("lanes", [PATIENT], ids=["killed"])
@pytest.mark.parametrize("other", ["prefill"], indirect=True)
def test_a_missing_sender_is_awaited_until_its_ticket_ends(decode: Half, other: Distant) -> None:
    """Its gateway learns of the loss and releases the reservation, and the lane ends with it."""
    decode.reserve("r", PROMPT)
    other.signal(signal.SIGKILL)
    decode.step()
    assert decode.lanes() == ["opening"]
    assert decode.side.engine.abort(["r"]) == 1
    decode.assert_idle()
    assert decode.lanes() == []
