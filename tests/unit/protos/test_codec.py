"""Messages between our own processes: what is listed survives, everything else is a typed error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from protos.codec import Messages
from protos.errors import Misconfigured, UnreadableMessage
from protos.values import FinishReason, LaneAddress

ADDRESS = LaneAddress(worker_id="d0", incarnation=2**40, host="::1", port=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    least: int
    most: float
    folder: Path
    reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if self.most < self.least:
            raise Misconfigured(f"most is {self.most}: it must be at least {self.least}")


MESSAGES = Messages({"range": Range, "pair": tuple[LaneAddress, int | None], "nothing": tuple[()]})


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("range", Range(least=1, most=float("inf"), folder=Path("/a b/ü"), reason=FinishReason.MOVED)),
        ("pair", (ADDRESS, None)),
        ("pair", (ADDRESS, -1)),
        ("nothing", ()),
    ],
)
def test_listed_messages_survive(name: str, body: object) -> None:
    assert MESSAGES.decode(MESSAGES.encode(name, body)) == (name, body)


def test_what_is_not_listed_is_not_sent() -> None:
    with pytest.raises(KeyError):
        MESSAGES.encode("shell", ())
    with pytest.raises(TypeError, match="cannot be sent between processes"):
        MESSAGES.encode("nothing", object())


PAIR = MESSAGES.encode("pair", (ADDRESS, 5))


@pytest.mark.parametrize("length", range(len(PAIR)))
def test_a_message_that_was_cut_off_is_a_typed_error(length: int) -> None:
    with pytest.raises(UnreadableMessage, match="the same version of Baton"):
        MESSAGES.decode(PAIR[:length])


@pytest.mark.parametrize(
    "packed",
    [
        PAIR + b"\0",
        b"\x04pair\x92\x91\xa2d0\x05",  # an address of one field
        b"\x04pair" + b"\x91" * 100_000,
        b"\x05range" + MESSAGES.encode("pair", (ADDRESS, 5))[5:],
        MESSAGES.encode("range", {"least": 3, "most": 1, "folder": "."}),  # refused by the value itself
        MESSAGES.encode("range", {"least": 0, "most": 1, "folder": 7}),
        MESSAGES.encode("range", {"least": 0, "most": 1, "folder": ".", "reason": "bored"}),
        b"\x05range\x81\xa2\xff\xff\x01",  # no UTF-8
    ],
    ids=["more", "too few fields", "deep", "another's body", "refused", "no path", "no such reason", "no text"],
)
def test_a_body_of_another_shape_is_a_typed_error(packed: bytes) -> None:
    with pytest.raises(UnreadableMessage):
        MESSAGES.decode(packed)
