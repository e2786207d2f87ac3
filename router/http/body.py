"""Request bodies: their JSON, limits on sizes, and validation. An error names the parameter, its value and what it must
be."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core.core_schema import CoreSchema, tagged_union_schema
from starlette.requests import Request
from starlette.types import Scope

from protos.errors import ContextLengthExceeded, InvalidRequest, UnsupportedMediaType, UnsupportedParameter
from protos.hints import nearest
from router.http.middleware import find_header, received_body
from router.text.model_card import RANGES, ModelCard, allowed
from router.text.sampling_request import MAX_CHOICES, SamplingRequest, check_length

_OFFERED = "this server does not offer it"


@dataclass(frozen=True, slots=True)
class Harmless:
    """The values at which a parameter changes nothing, and why others are refused. Null never changes anything."""

    accepts: Callable[[Any], bool]
    schema: Mapping[str, Any]
    why: str


def one_of(*values: Any, why: str = _OFFERED) -> Harmless:
    def accepts(value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in values)

    return Harmless(accepts, {"enum": [*values, None]}, why)


def never(why: str = _OFFERED) -> Harmless:
    return Harmless(lambda value: False, {"type": "null"}, why)


def without_harmless(body: Mapping[str, Any], refusals: Mapping[str, Harmless], *, where: str = "") -> dict[str, Any]:
    """The body without parameters that change nothing. Raises UnsupportedParameter for one that would."""
    kept = dict(body)
    for name in refusals.keys() & body.keys():
        value = kept.pop(name)
        if value is not None and not refusals[name].accepts(value):
            # The value as JSON. reprlib is bounded in depth too: an object may be nested deeper than repr() can go.
            shown = json.dumps(value) if value is True or value is False else reprlib.repr(value)
            raise UnsupportedParameter(
                f"'{where}{name}' is not supported with the value {shown[:80]}{'...' if len(shown) > 80 else ''}: "
                f"{refusals[name].why}; leave it out",
                param=f"{where}{name}",
            )
    return kept


MAX_PARAMETERS = 256  # parameters of one object
MAX_PIECES = 4096  # messages and text parts of a conversation


def check_parameters(body: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for an object of more parameters than any request has."""
    if len(body) > MAX_PARAMETERS:
        raise InvalidRequest(f"One object has {len(body)} parameters: at most {MAX_PARAMETERS} are read")


def check_sizes(body: Mapping[str, Any], known: Collection[str], card: ModelCard) -> None:
    """Checks parameters that can be long. Raises InvalidRequest, and ContextLengthExceeded for a prompt longer than the
    context."""
    check_parameters(body)
    if "messages" in known and isinstance(body.get("messages"), list):
        _check_messages(body["messages"], card, "messages")
    if "input" in known and isinstance(found := body.get("input"), list):
        check = _check_messages if any(isinstance(one, dict) for one in found) else _check_prompts
        check(found, card, "input")
    if "prompt" in known and isinstance(body.get("prompt"), list):
        _check_prompts(body["prompt"], card, "prompt")
    if "tokens" in known and isinstance(body.get("tokens"), list) and len(body["tokens"]) > card.max_model_len:
        raise _too_many("tokens", f"{len(body['tokens'])} token ids", card.max_model_len, card)


def _check_messages(messages: list[Any], card: ModelCard, param: str) -> None:
    contents = (one.get("content") for one in messages if isinstance(one, dict))
    num_pieces = len(messages) + sum(len(one) for one in contents if isinstance(one, list))
    most = min(card.max_model_len, MAX_PIECES)
    if num_pieces > most:
        raise _too_many(param, f"{num_pieces} messages and text parts", most, card)


def _check_prompts(prompts: list[Any], card: ModelCard, param: str) -> None:
    """Checks the number of prompts. Token ids may be one prompt or many."""
    if prompts and isinstance(prompts[0], int):
        check_length(len(prompts), card, param=param)
        return
    if len(prompts) > MAX_CHOICES:
        raise InvalidRequest(f"'{param}' has {len(prompts)} prompts: it must have at most {MAX_CHOICES}", param=param)
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, list):
            check_length(len(prompt), card, param=param if len(prompts) == 1 else f"{param}[{index}]")


def _too_many(param: str, what: str, most: int, card: ModelCard) -> ContextLengthExceeded:
    limit = f"This model's maximum context length is {card.max_model_len} tokens. However, '{param}' has {what}"
    return ContextLengthExceeded(f"{limit}: at most {most} are read", param=param)


def at_most(num_entries: int) -> BeforeValidator:
    """Refuses a larger object or list before its entries are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > num_entries:
            raise ValueError("too many entries")
        return value

    return BeforeValidator(check)


MAX_DEPTH, MAX_JSON_DEPTH = 64, 128
"""Levels of objects and lists in a JSON Schema, and in any other JSON that a client or a model wrote."""
_WRITABLE_DEPTH = 254  # orjson's own limit

TOO_DEEP = "nested too deeply"


def read_json(text: bytes | str) -> Any:
    """Reads JSON of clients and models so that it can be written again. Raises ValueError."""
    return shallow(orjson.loads(text), MAX_JSON_DEPTH)


def shallow(value: Any, most: int = MAX_DEPTH) -> Any:
    """Raises ValueError for a value nested more than `most` deep. Writing it inside lists takes a tenth of a walk's
    time."""
    nested = value
    for _ in range(_WRITABLE_DEPTH - most):
        nested = [nested]
    try:
        orjson.dumps(nested)
    except TypeError:
        raise ValueError(f"{TOO_DEEP}: {most} levels are read") from None
    return value


Schema = Annotated[
    dict[str, Any], BeforeValidator(shallow), Field(description=f"a JSON Schema, nested at most {MAX_DEPTH} deep")
]


def ranged(name: str, kind: str, default: Any = None) -> Any:
    """The field of a parameter with its range."""
    low, high = RANGES[name]
    return Field(default=default, ge=low, le=high, description=f"{kind} {allowed(name)}")


class FirstWrong(FailFast):
    """Stops at the first wrong item of a list: pydantic would report all of them, for seconds."""

    __hash__ = object.__hash__  # a union's member must be hashable, and pydantic's own is not


def _is_exact(number: float) -> bool:
    """Above 2^53 a float no longer identifies one integer."""
    return number.is_integer() and abs(number) <= 2**53


def whole_ids(value: Any, depth: int = 2) -> Any:
    """The ids with 8.0 as 8."""
    if isinstance(value, list) and depth:
        return [int(one) if isinstance(one, float) and _is_exact(one) else whole_ids(one, depth - 1) for one in value]
    return value


class Body(BaseModel):
    """`description` of a field completes the sentence "it must be ...".

    - `harmless`: parameters that are accepted where they change nothing
    - `id_lists`: parameters that may be lists of integers, which are read again where they are not (8.0)
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    harmless: ClassVar[Mapping[str, Harmless]] = {}
    id_lists: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def prepare(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters to validate. Raises UnsupportedParameter."""
        return without_harmless(found, cls.harmless)

    @classmethod
    def hint(cls, name: str, known: type[Body]) -> str:
        """Suggests where a parameter that this body's part `known` lacks belongs; "" if unknown."""
        return ""

    def check_parts(self) -> None:
        """Checks what types cannot express. Raises InvalidRequest."""

    @model_validator(mode="before")
    @classmethod
    def _not_too_many(cls, value: Any) -> Any:
        """Limits the number of parameters, and reads 8.0 as an integer, as JSON Schema does."""
        if not isinstance(value, dict):
            return value
        check_parameters(value)  # pydantic would report each of a megabyte of unknown parameters
        whole = {name: int(one) for name, one in value.items() if isinstance(one, float) and _is_exact(one)}
        return value | {name: one for name, one in whole.items() if cls._is_integer(name)} if whole else value

    @classmethod
    def _is_integer(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        return field is not None and field.annotation in (int, int | None)


class OpenBody(Body):
    """Fields that are not listed are accepted: clients send those of their API's latest version."""

    model_config = ConfigDict(extra="allow")


LATEST_S = 10**11


def second(default: Any) -> Any:
    """The field of a moment."""
    return Field(default=default, ge=0, le=LATEST_S, description="whole seconds since 1970")


class Query(Body):
    """The parameters of a URL; others are passed over."""

    model_config = ConfigDict(extra="ignore", strict=False)


class OtherPart(OpenBody):
    """A part of an unlisted kind, which its reader skips or refuses."""

    type: Any = None
    role: Any = None


class ByKind:
    """Chooses a member of a union by the value of a field; an `OtherPart` takes all other values."""

    def __init__(self, name: str = "type", default: str | None = None) -> None:
        """`default`: the value where the field is missing."""
        self._name = name
        self._default = default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds = [kind for kind in get_args(source) if kind is not NoneType]
        names = {
            value: kind.__name__
            for kind in kinds
            if kind is not OtherPart
            for value in _values(kind.model_fields[self._name].annotation)
        }

        def name_of(part: Any) -> str:
            value = part.get(self._name, self._default) if isinstance(part, dict) else getattr(part, self._name, "")
            return names.get(value, OtherPart.__name__) if isinstance(value, str | None) else OtherPart.__name__

        return tagged_union_schema({kind.__name__: handler.generate_schema(kind) for kind in kinds}, name_of)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        choices: dict[str, CoreSchema] = schema["choices"]
        return {"anyOf": [handler(choice) for name, choice in choices.items() if name != OtherPart.__name__]}


def _values(annotation: Any) -> Iterator[str | None]:
    """The values of a Literal; None if the field may be null."""
    for value in get_args(annotation) or (annotation,):
        if isinstance(value, str):
            yield value
        elif value is NoneType:
            yield None
        elif value is not annotation:
            yield from _values(value)


MAX_TTFT_MS = "x-baton-max-ttft-ms"
MAX_NAME_CHARS = 100  # names that an answer repeats
MAX_SESSION_CHARS = 256
SESSION_HEADERS = (b"x-claude-code-session-id", b"x-session-id", b"session-id", b"session_id", b"x-dynamo-session-id")
"""Claude Code, opencode and others, Codex (two versions) and Dynamo's clients send these, in this order."""

_BRANCH = re.compile(r"str|int|float|bool|.*\[.*", re.DOTALL)
"""pydantic's names of the members of a union that are no bodies."""
_PARTS = re.compile(r"(list\[)?tagged-union|list\[[A-Z]")
"""Its names of parts, and of lists of bodies."""

_Body = TypeVar("_Body", bound=Body)


async def read_body(request: Request, kind: type[_Body], card: ModelCard) -> _Body:
    """The request's JSON as a checked body. Raises InvalidRequest or what is below it (protos.errors)."""
    encoding = find_header(request.scope, b"content-encoding")
    if encoding is not None and encoding.lower() != "identity":
        problem = f"The body comes with 'Content-Encoding: {encoding[:MAX_NAME_CHARS]}'"
        raise UnsupportedMediaType(f"{problem}: send plain JSON without this header, nothing is decompressed here")
    raw = await received_body(request)
    try:
        found = read_json(raw)
    except ValueError as error:
        problem = f"not valid JSON: {error}" if raw else "empty"
        raise InvalidRequest(f"The body is {problem}; send a JSON object in UTF-8") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {shown(found)}")
    check_sizes(found, kind.model_fields, card)
    return parse_body(found, kind)


def with_headers(sampling: SamplingRequest, request: Request) -> SamplingRequest:
    """Adds the session, and the `max_ttft_ms` of a header; the body takes precedence."""
    sampling = replace(sampling, session=request.scope["state"].get("session", ""))
    header = find_header(request.scope, MAX_TTFT_MS.encode())
    if header is None:
        return sampling
    low, high = RANGES["max_ttft_ms"]
    with suppress(ValueError):
        if low <= (bound := float(header)) <= high:
            return replace(sampling, max_ttft_ms=bound) if sampling.max_ttft_ms is None else sampling
    problem = f"The header '{MAX_TTFT_MS}' is {header[:60]!r}"
    raise InvalidRequest(f"{problem}: it must be a number of milliseconds from {low} to {high}", param="max_ttft_ms")


def read_query(request: Request, kind: type[_Body]) -> _Body:
    """A name may end in "[]" where it may come several times. Raises InvalidRequest."""
    sent, found = request.query_params, {}
    for name, field in kind.model_fields.items():
        if values := [*sent.getlist(name), *sent.getlist(f"{name}[]")]:
            found[name] = values if get_origin(field.annotation) is list else values[-1]
    return parse_body(found, kind)


def session_of(scope: Scope, body: Body) -> str:
    """The client's name of its conversation: an agent's header, OpenAI's `prompt_cache_key`, or the session in Claude
    Code's `metadata.user_id`. "" without one. It is for people, and decides nothing."""
    headers = dict(scope["headers"])
    names = [headers[name].decode("latin-1") for name in SESSION_HEADERS if name in headers]
    metadata = getattr(body, "metadata", None)
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if isinstance(user, str):
        with suppress(ValueError):
            user = {"session_id": user.partition("_session_")[2]} if "_session_" in user else read_json(user)
    names += [getattr(body, "prompt_cache_key", None), user.get("session_id") if isinstance(user, dict) else None]
    return next((name[:MAX_SESSION_CHARS] for name in names if name and isinstance(name, str)), "")


def parse_body(found: Mapping[str, Any], kind: type[_Body]) -> _Body:
    """Raises InvalidRequest, which names the first parameter that is wrong."""
    kept = kind.prepare(found)
    try:
        body = kind.model_validate(kept)
    except ValidationError as error:
        whole = {name: whole_ids(value) for name, value in kept.items() if name in kind.id_lists}
        try:
            body = kind.model_validate(kept | whole)
        except ValidationError:
            raise _refused(error, kind) from None
    body.check_parts()
    return body


def _refused(error: ValidationError, kind: type[Body]) -> InvalidRequest:
    """The first error. What is wrong in a part or an object is named, not the alternative that it is no string."""
    errors = error.errors(include_url=False, include_context=False)
    first = max(
        errors,
        key=lambda one: (
            sum(_PARTS.match(str(step)) is not None for step in one["loc"][:-1]),
            not (one["type"] == "string_type" and isinstance(one["input"], dict)),
        ),
    )
    is_unknown = first["type"] == "extra_forbidden"
    path, owner, expected = _place(first["loc"], kind, is_unknown=is_unknown)
    if is_unknown:
        name = str(first["loc"][-1])[:MAX_NAME_CHARS]
        return InvalidRequest(f"Unknown parameter: '{path}'.{_hint(name, owner, kind)}", param=path)
    if first["type"] == "missing":
        return InvalidRequest(f"Missing required parameter: '{path}'.", param=path)
    value = TOO_DEEP if TOO_DEEP in first["msg"] else shown(first["input"])
    return InvalidRequest(f"'{path}' is {value}: it must be {expected or first['msg']}", param=path)


def _hint(name: str, known: type[Body], kind: type[Body]) -> str:
    """Suggests where a parameter of `known`, a part of `kind`, belongs; "" if unknown."""
    if found := kind.hint(name, known):
        return found
    close = nearest(name, [*known.model_fields, *known.harmless])
    return f" Did you mean '{close}'?" if close else ""


def _place(loc: tuple[int | str, ...], kind: type[Body], *, is_unknown: bool) -> tuple[str, type[Body], str | None]:
    """`messages[0].content`, the model whose field it is, and the allowed values. Names of a union's members are left
    out."""
    path, owner, expected = "", kind, None
    members: dict[str, type[Body]] = {}
    for number, step in enumerate(loc, 1):
        if isinstance(step, int):
            path += f"[{step}]"
            expected = "an object" if members else expected
        elif step in members:
            owner = members[step]
        elif step == "str" and members and isinstance(loc[number - 2], int):
            expected = "a string or an object"
        elif (field := field_of(owner, step)) is not None:
            path, expected = _joined(path, step), field.description
            members = {member.__name__: member for member in _bodies(field.annotation)}
            owner = next(iter(members.values()), kind)
        elif number == len(loc) and (is_unknown or not _BRANCH.fullmatch(step)):
            path = _joined(path, step)
    return path, owner, expected


def _joined(path: str, name: str) -> str:
    return f"{path}.{name[:MAX_NAME_CHARS]}" if path else name[:MAX_NAME_CHARS]


def _bodies(annotation: Any) -> Iterator[type[Body]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        yield annotation
    for part in get_args(annotation):
        yield from _bodies(part)


def field_of(kind: type[Body], name: str) -> FieldInfo | None:
    return next((field for own, field in kind.model_fields.items() if name in (own, field.alias)), None)


def shown(value: Any) -> str:
    """A JSON value for error messages: shortened, with its type if the type is wrong."""
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case dict():
            return "an object"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case str():
            return f"the string {value[:60]!r}{'...' if len(value) > 60 else ''}"
        case _:
            return f"{value!r}"
