"""Messages between our own processes: what is listed survives, everything else is a typed error."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path

import msgspec
import orjson
import pytest

from protos.codec import Messages, Value
from protos.errors import Misconfigured, UnreadableMessage
from protos.values import FinishReason, LaneAddress, LaneLoad, SamplingParams, SequenceUpdate, WorkerLoad

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


def test_unlisted_types_are_not_sent() -> None:
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


UPDATE = SequenceUpdate(request_id="a", token_ids=(1, 2), finish_reason=FinishReason.STOP)


def test_a_value_is_frozen_and_equal_to_its_like() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        UPDATE.request_id = "b"  # type: ignore[misc]
    again = SequenceUpdate(request_id="a", token_ids=(1, 2), finish_reason=FinishReason.STOP)
    assert again == UPDATE
    assert hash(UPDATE) == hash(again)
    assert replace(UPDATE, token_ids=()) != UPDATE


def test_its_fields_are_named_when_it_is_made() -> None:
    with pytest.raises(TypeError, match="request_id"):
        SequenceUpdate()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SequenceUpdate("a")  # type: ignore[call-arg]


def test_dataclasses_and_orjson_know_its_fields() -> None:
    load = WorkerLoad(step=3, lanes=(LaneLoad(transport="shm"),))
    assert is_dataclass(load)
    assert [field.name for field in fields(load)][:2] == ["step", "num_running"]
    told = asdict(load)
    assert told["lanes"][0]["transport"] == "shm"
    assert orjson.loads(orjson.dumps(load))["lanes"][0]["transport"] == "shm"


def test_every_field_survives_msgpack_and_is_not_named_there() -> None:
    params = SamplingParams(seed=2**40, logit_bias=((3, 0.5),), grammar="x")
    for value in (UPDATE, params):
        packed = msgspec.msgpack.encode(value)
        assert msgspec.msgpack.decode(packed, type=type(value)) == value
        assert not any(field.name.encode() in packed for field in fields(value))


def test_the_garbage_collector_tracks_no_value() -> None:
    assert not gc.is_tracked(replace(UPDATE))


class _Point(Value, frozen=True, kw_only=True):
    x: int
    y: int = 2


def test_defaults_are_kept() -> None:
    assert replace(_Point(x=1), x=5) == _Point(x=5, y=2)


def test_a_value_has_fields_of_its_own_alone() -> None:
    with pytest.raises(TypeError, match="_Deeper derives from another value"):

        class _Deeper(_Point, frozen=True, kw_only=True):
            z: int
