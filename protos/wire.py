"""Values <-> protobuf: the only file that touches pb2 fields of `kv.proto` and `worker.proto`.

A value and its message have the same field names, so one table-driven codec serves them all; the few fields whose
shapes differ (packed hashes, the event union, bias pairs) have an entry in `_SPECIAL`.
Decoders are built once per class. Only the hot ones are written out: `SequenceUpdate`, which tokens pass through, and
what every step of a worker brings, because a process that sleeps between steps finds its code in no cache.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum, StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from protos import kv_pb2, values, worker_pb2
from protos.chain import Chain
from protos.errors import BatonError, Internal, error_from_code
from protos.hints import encodable

Value = TypeVar("Value")
Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]

_MESSAGES: dict[type, type[Message]] = {
    values.SpeculationParams: worker_pb2.Speculation,
    values.SamplingParams: worker_pb2.SamplingParams,
    values.KVPart: kv_pb2.KVPart,
    values.KVGroup: kv_pb2.KVGroup,
    values.KVLayout: kv_pb2.KVLayout,
    values.KVHead: kv_pb2.KVHead,
    values.LaneAddress: kv_pb2.LaneAddress,
    values.Ticket: kv_pb2.Ticket,
    values.GenerateRequest: worker_pb2.GenerateRequest,
    values.ReserveRequest: worker_pb2.ReserveRequest,
    values.MoveRequest: worker_pb2.MoveRequest,
    values.ShareRequest: worker_pb2.ShareRequest,
    values.TokenLogprob: worker_pb2.TokenLogprob,
    values.Logprobs: worker_pb2.Logprobs,
    values.ErrorInfo: worker_pb2.ErrorInfo,
    values.SequenceUpdate: worker_pb2.SequenceUpdate,
    values.BlockStored: kv_pb2.BlockStored,
    values.BlockRemoved: kv_pb2.BlockRemoved,
    values.Cleared: kv_pb2.Cleared,
    values.KVEvents: kv_pb2.KVEvents,
    values.LaneLoad: worker_pb2.LaneLoad,
    values.HostLoad: worker_pb2.HostLoad,
    values.SpeculationLoad: worker_pb2.SpeculationLoad,
    values.DraftCounts: worker_pb2.DraftCounts,
    values.PausedProposer: worker_pb2.PausedProposer,
    values.WorkerLoad: worker_pb2.WorkerLoad,
    values.Adapter: worker_pb2.Adapter,
    values.AdapterList: worker_pb2.AdapterList,
    values.StepMessage: worker_pb2.FromWorker,
    values.Hello: worker_pb2.Hello,
    values.ModelDigests: worker_pb2.ModelDigests,
    values.WorkerInfo: worker_pb2.WorkerInfo,
    values.TicketStats: worker_pb2.TicketStats,
    values.LaneStats: worker_pb2.LaneStats,
    values.WorkerStats: worker_pb2.WorkerStats,
    values.Health: worker_pb2.HealthReply,
    values.KVPiece: worker_pb2.KVPiece,
    values.TierStats: worker_pb2.TierStats,
    values.Span: worker_pb2.Span,
    values.Profile: worker_pb2.ProfileReply,
}


def to_proto(value: Any) -> Any:
    """The protobuf message for a value of `protos.values`."""
    kind: Any = type(value)
    if kind is values.SequenceUpdate:
        return _encode_update(value)
    if kind is values.KVLayout:
        return _encode_layout(value)
    return _MESSAGES[kind](**_content(value))


def to_submit(request: values.GenerateRequest, number: int) -> worker_pb2.ToWorker:
    """Hands a request over under this number. Built where it lies: a long prompt's tokens are not copied again."""
    submit: Any = _content(request) | {"number": number}
    return worker_pb2.ToWorker(submit=submit)


def from_proto(kind: type[Value], message: Any) -> Value:
    """The value a message stands for. Raises ValueError where an enum's value is unknown. A value stays one."""
    if type(message) is kind:
        return message
    key: Any = kind
    if (written := _WRITTEN.get(key)) is not None:
        decoded: Value = written(message)
        return decoded
    return kind(**{name: decode(message) for name, decode in _decoders(key)})


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
    """The typed error for what crossed the boundary."""
    return error_from_code(info.code, info.message, param=info.param or None, retry_after_s=info.retry_after_s or None)


# ---------------------------------------------------------------------------------------------------------------------


def _content(value: Any) -> dict[str, Any]:
    """The fields of a value's message, by name."""
    kind: Any = type(value)
    plain, others = _encoders(kind)
    content = {name: getattr(value, name) for name in plain}
    for name, encode in others:
        content[name] = encode(getattr(value, name))
    return content


def _encode_update(update: values.SequenceUpdate) -> worker_pb2.SequenceUpdate:
    """Leaves out what is at its default: most updates are an id and a token."""
    message = worker_pb2.SequenceUpdate(request_id=update.request_id, token_ids=update.token_ids)
    if update.logprobs:
        message.logprobs.extend([to_proto(item) for item in update.logprobs])
    if update.prompt_logprobs:
        message.prompt_logprobs.extend([to_proto(item) for item in update.prompt_logprobs])
    if update.finish_reason is not None:
        message.finish_reason = update.finish_reason
    if update.error is not None:
        message.error.CopyFrom(to_proto(update.error))
    if update.num_cached_tokens:
        message.num_cached_tokens = update.num_cached_tokens
    if update.num_prompt_computed:
        message.num_prompt_computed = update.num_prompt_computed
    if update.embedding:
        message.embedding = update.embedding
    if update.num_drafted:
        message.num_drafted, message.num_accepted = update.num_drafted, update.num_accepted
        message.num_predicted, message.num_mispredicted = update.num_predicted, update.num_mispredicted
    return message


def _decode_update(message: Any) -> Any:
    reason, logprobs, prompt_logprobs = message.finish_reason, message.logprobs, message.prompt_logprobs
    return values.SequenceUpdate(
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        logprobs=tuple([from_proto(values.Logprobs, item) for item in logprobs]) if logprobs else (),
        prompt_logprobs=tuple([from_proto(values.Logprobs, item) for item in prompt_logprobs])
        if prompt_logprobs
        else (),
        finish_reason=values.FinishReason(reason) if reason else None,
        error=from_proto(values.ErrorInfo, message.error) if message.HasField("error") else None,
        num_cached_tokens=message.num_cached_tokens,
        num_prompt_computed=message.num_prompt_computed,
        embedding=message.embedding,
        num_predicted=message.num_predicted,
        num_mispredicted=message.num_mispredicted,
        num_drafted=message.num_drafted,
        num_accepted=message.num_accepted,
    )


def _decode_step(message: Any) -> values.StepMessage:
    updates, events = message.updates, message.events
    return values.StepMessage(
        updates=tuple([_decode_update(update) for update in updates]) if updates else (),
        events=tuple([from_proto(values.KVEvents, one) for one in events]) if events else (),
        load=_decode_load(message.load) if message.HasField("load") else None,
        numbers=tuple(message.numbers[:]),
        token_ids=tuple(message.token_ids[:]),
        role=values.WorkerRole(message.role) if message.role else None,
        adapters=from_proto(values.AdapterList, message.adapters) if message.HasField("adapters") else None,
    )


_LOAD = tuple(field.name for field in fields(values.WorkerLoad) if field.name not in ("lanes", "host", "speculation"))
_load_of = attrgetter(*_LOAD)


def _decode_load(message: Any) -> values.WorkerLoad:
    lanes = message.lanes
    return values.WorkerLoad(
        **dict(zip(_LOAD, _load_of(message), strict=True)),
        lanes=tuple([from_proto(values.LaneLoad, lane) for lane in lanes]) if lanes else (),
        host=from_proto(values.HostLoad, message.host) if message.HasField("host") else None,
        speculation=from_proto(values.SpeculationLoad, message.speculation)
        if message.HasField("speculation")
        else None,
    )


def _encode_layout(layout: values.KVLayout) -> kv_pb2.KVLayout:
    """Keys and values alike in all layers are written as before there were groups. A worker that knows none reads of
    any other cache that it has 0 layers, and refuses to exchange KV with it."""
    first = layout.parts[0] if layout.parts else None
    if first is not None and layout.groups == _groups_of(layout.num_layers, first):
        return kv_pb2.KVLayout(
            num_layers=layout.num_layers,
            num_kv_heads=first.heads,
            head_dim=first.width,
            dtype=first.dtype,
            block_size=layout.block_size,
            tp=layout.tp,
            model=layout.model,
            device=layout.device,
            head=to_proto(layout.head) if layout.head is not None else None,
        )
    return kv_pb2.KVLayout(**_content(layout))


def _decode_layout(message: Any) -> values.KVLayout:
    if message.groups:
        return values.KVLayout(**{name: decode(message) for name, decode in _decoders(values.KVLayout)})
    return values.KVLayout.dense(
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        dtype=message.dtype,
        block_size=message.block_size,
        tp=message.tp,
        model=message.model,
        device=message.device,
        head=from_proto(values.KVHead, message.head) if message.HasField("head") else None,
    )


def _groups_of(num_layers: int, part: values.KVPart) -> tuple[values.KVGroup, ...]:
    return values.KVLayout.dense(
        num_layers=num_layers, num_kv_heads=part.heads, head_dim=part.width, dtype=part.dtype, block_size=1
    ).groups


_WRITTEN: dict[type, Decode] = {
    values.KVLayout: _decode_layout,
    values.SequenceUpdate: _decode_update,
    values.StepMessage: _decode_step,
    values.WorkerLoad: _decode_load,
}


_EVENTS: dict[type, str] = {values.BlockStored: "stored", values.BlockRemoved: "removed", values.Cleared: "cleared"}


def _encode_events(events: Iterable[values.KVEvent]) -> list[kv_pb2.KVEvent]:
    return [kv_pb2.KVEvent(**{_EVENTS[type(event)]: to_proto(event)}) for event in events]


def _decode_events(messages: Iterable[Any]) -> tuple[values.KVEvent, ...]:
    return tuple([_decode_event(message) for message in messages])


def _decode_event(message: Any) -> values.KVEvent:
    """Written out: a router decodes thousands a second."""
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


@cache
def _encoders(kind: type) -> tuple[tuple[str, ...], tuple[tuple[str, Encode], ...]]:
    """Names of the fields that are the same in both shapes, and those of the others, each with what encodes it."""
    hints = get_type_hints(kind)
    plain = tuple(
        field.name for field in fields(kind) if (kind, field.name) not in _SPECIAL and _is_plain(hints[field.name])
    )
    others = (field.name for field in fields(kind) if field.name not in plain)
    return plain, tuple((name, _SPECIAL.get((kind, name), (_encode, None))[0]) for name in others)


def _is_plain(hint: Any) -> bool:
    """A scalar, perhaps none, or some of them."""
    parts = [part for part in get_args(hint) if part not in (type(None), ...)] or [hint]
    return all(part in _SCALARS for part in parts)


def _encode(value: Any) -> Any:
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [to_proto(item) for item in value]
    return to_proto(value) if is_dataclass(value) else value


@cache
def _decoders(kind: type) -> tuple[tuple[str, Decode], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, _decoder(kind, field.name, hints[field.name])) for field in fields(kind))


def _decoder(kind: type, name: str, hint: Any) -> Decode:
    special = _SPECIAL.get((kind, name))
    if special is not None:
        unpack = special[1]
        return lambda message: unpack(getattr(message, name))
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        present = _decoder(kind, name, inner)
        if issubclass(inner, StrEnum):
            return lambda message: present(message) if getattr(message, name) else None
        return lambda message: present(message) if message.HasField(name) else None
    if get_origin(hint) is tuple:
        item: Any = get_args(hint)[0]
        if item in _MESSAGES:
            return lambda message: tuple([from_proto(item, part) for part in getattr(message, name)])
        return lambda message: tuple(getattr(message, name)[:])  # a slice is quicker than iterating
    if is_dataclass(hint):
        nested: Any = hint
        return lambda message: from_proto(nested, getattr(message, name))
    if isinstance(hint, type) and issubclass(hint, (StrEnum, IntEnum)):
        return lambda message: hint(getattr(message, name))
    return lambda message: getattr(message, name)
