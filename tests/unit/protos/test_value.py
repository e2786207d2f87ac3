"""A value is what it says to be: frozen, compared by its fields, and a dataclass to whoever knows those only."""

from __future__ import annotations

import gc
from dataclasses import asdict, fields, is_dataclass, replace

import msgspec
import orjson
import pytest

from protos.codec import Value
from protos.values import FinishReason, LaneLoad, SamplingParams, SequenceUpdate, WorkerLoad

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


def test_the_collector_of_cycles_never_looks_at_one() -> None:
    assert not gc.is_tracked(replace(UPDATE))


class _Point(Value, frozen=True, kw_only=True):
    x: int
    y: int = 2


def test_defaults_are_those_that_are_written() -> None:
    assert replace(_Point(x=1), x=5) == _Point(x=5, y=2)


def test_a_value_has_fields_of_its_own_alone() -> None:
    """Inherited fields would be there, and `dataclasses` and orjson would leave them out."""
    with pytest.raises(TypeError, match="_Deeper derives from another value"):

        class _Deeper(_Point, frozen=True, kw_only=True):
            z: int
