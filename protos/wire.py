"""Values <-> protobuf: the only file that touches pb2 fields of `kv.proto` and `worker.proto`."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum, StrEnum
from functools import cache, lru_cache, partial
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from protos import kv_pb2, values, worker_pb2
from protos.chain import Chain
from protos.errors import BatonError, Internal, error_from_code
from protos.hints import encodable

Value = TypeVar("Value")
Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]


def to_proto(value: Any) -> Any:
    return _layout_message(value) if type(value) is values.KVLayout else _codec(type(value)).encode(value)


def to_submit(request: values.GenerateRequest, number: int) -> worker_pb2.ToWorker:
    """The message that submits a request whose updates may be sent under a number.

    Fields that must be set anew would be copied with the whole prompt, so they are set here.
    """
    submit: Any = _codec(values.GenerateRequest).content(request) | {"number": number}
    return worker_pb2.ToWorker(submit=submit)


def from_proto(kind: type[Value], message: Any) -> Value:
    """Raises ValueError for an unknown enum value. A value of this kind is returned as it is: the simulator's network
    carries values in place of messages."""
    if type(message) is kind:
        return message
    key: Any = kind
    decoded: Value = _layout_of(message.SerializeToString()) if key is values.KVLayout else _codec(key).decode(message)
    return decoded


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelEncoding:
    """How values travel on a channel: as protobuf, or as they are on a channel within one process."""

    value: Callable[[Any], Any] = to_proto
    submit: Callable[[values.GenerateRequest, int], Any] = to_submit


PROTOBUF = ChannelEncoding()


def error_info(error: BaseException) -> values.ErrorInfo:
    """An error as it crosses a boundary; an error outside our tree is a bug, and only its type is sent."""
    if not isinstance(error, BatonError):
        text = encodable(f"internal error: {type(error).__name__}: {error}")
        return values.ErrorInfo(code=Internal.code, message=text)
    return values.ErrorInfo(
        code=error.code,
        message=encodable(error.message),
        param=encodable(error.param or ""),
        retry_after_s=error.retry_after_s or 0.0,
    )


def raised(info: values.ErrorInfo) -> BatonError:
    return error_from_code(info.code, info.message, param=info.param or None, retry_after_s=info.retry_after_s or None)


# ---------------------------------------------------------------------------------------------------------------------


_EVENTS: dict[type, str] = {values.BlockStored: "stored", values.BlockRemoved: "removed", values.Cleared: "cleared"}


def _encode_events(events: Iterable[values.KVEvent]) -> list[kv_pb2.KVEvent]:
    return [kv_pb2.KVEvent(**{_EVENTS[type(event)]: to_proto(event)}) for event in events]


def _decode_events(messages: Iterable[Any]) -> tuple[values.KVEvent, ...]:
    return tuple([_decode_event(message) for message in messages])


def _decode_event(message: Any) -> values.KVEvent:
    """Fields are written out for speed: a router decodes thousands of events a second."""
    kind = message.WhichOneof("event")
    if kind == "stored":
        stored = message.stored
        return values.BlockStored(hashes=Chain(stored.hashes), parent=stored.parent, tier=values.Tier(stored.tier))
    if kind == "removed":
        removed = message.removed
        return values.BlockRemoved(hashes=Chain(removed.hashes), tier=values.Tier(removed.tier))
    if kind == "cleared":
        return values.Cleared()
    raise ValueError("a KV event of an unknown kind")


def _encode_bias(bias: Iterable[tuple[int, float]]) -> list[worker_pb2.TokenBias]:
    return [worker_pb2.TokenBias(token_id=token, bias=value) for token, value in bias]


def _decode_bias(messages: Iterable[Any]) -> tuple[tuple[int, float], ...]:
    return tuple((message.token_id, message.bias) for message in messages)


_SPECIAL: dict[tuple[type, str], tuple[Encode, Decode]] = {
    (values.BlockStored, "hashes"): (lambda hashes: Chain.of(hashes).packed, Chain),
    (values.BlockRemoved, "hashes"): (lambda hashes: Chain.of(hashes).packed, Chain),
    (values.ShareRequest, "hashes"): (lambda hashes: Chain.of(hashes).packed, lambda packed: tuple(Chain(packed))),
    (values.KVEvents, "events"): (_encode_events, _decode_events),
    (values.SamplingParams, "logit_bias"): (_encode_bias, _decode_bias),
}


_SCALARS = (int, float, bool, str, bytes)


@lru_cache(maxsize=256)
def _layout_message(layout: values.KVLayout) -> Any:
    """The layout as a message, encoded once: every reservation and ticket carries it."""
    return _codec(values.KVLayout).encode(layout)


@lru_cache(maxsize=256)
def _layout_of(packed: bytes) -> Any:
    return _codec(values.KVLayout).decode(kv_pb2.KVLayout.FromString(packed))


class _Codec:
    """Converts the values of one class. Fields with the default None are optional in the message."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._message = getattr(kv_pb2, kind.__name__, None) or getattr(worker_pb2, kind.__name__)
        hints = get_type_hints(kind)
        self._plain: list[str] = []  # scalars, the same in both
        self._others: list[tuple[str, bool, Encode, Decode]] = []  # the second: may be absent
        for field in fields(kind):
            inner, may_be_absent = _without_none(hints[field.name])
            if not may_be_absent and inner in _SCALARS:
                self._plain.append(field.name)
            else:
                encode, decode = _SPECIAL.get((kind, field.name)) or _converter(inner)
                if may_be_absent and issubclass(inner, StrEnum):  # a plain string in the message: "" if it is absent
                    may_be_absent, decode = False, partial(_enum_or_none, inner)
                self._others.append((field.name, may_be_absent, encode, decode))

    def content(self, value: Any) -> dict[str, Any]:
        content = {name: item for name in self._plain if (item := getattr(value, name))}
        for name, _, encode, _ in self._others:
            if (item := getattr(value, name)) is not None:
                content[name] = encode(item)
        return content

    def encode(self, value: Any) -> Any:
        return self._message(**self.content(value))

    def decode(self, message: Any) -> Any:
        content = {name: getattr(message, name) for name in self._plain}
        for name, may_be_absent, _, decode in self._others:
            if not may_be_absent or message.HasField(name):
                content[name] = decode(getattr(message, name))
        return self._kind(**content)


_codec: Callable[[Any], _Codec] = cache(_Codec)


def _without_none(hint: Any) -> tuple[Any, bool]:
    inner = [arg for arg in get_args(hint) if arg is not types.NoneType]
    is_union = get_origin(hint) in (Union, types.UnionType)
    return (inner[0], True) if is_union and len(inner) == 1 else (hint, False)


def _converter(hint: Any) -> tuple[Encode, Decode]:
    item: Any = get_args(hint)[0] if get_origin(hint) is tuple else None
    if _is_value(item):
        return _encode_all, lambda messages: tuple([from_proto(item, message) for message in messages])
    if item is not None:
        return _same, lambda numbers: tuple(numbers[:])  # a slice is quicker than iterating
    if _is_value(hint):
        return to_proto, partial(from_proto, hint)
    return _same, hint if issubclass(hint, StrEnum | IntEnum) else _same


def _is_value(hint: Any) -> bool:
    return is_dataclass(hint)


def _encode_all(items: Iterable[Any]) -> list[Any]:
    return [to_proto(item) for item in items]


def _enum_or_none(kind: type[StrEnum], text: str) -> StrEnum | None:
    return kind(text) if text else None


def _same(value: Any) -> Any:
    return value
