"""Reads a request's body. An error names the parameter, its value and what it must be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from starlette.requests import Request

from protos.errors import InvalidRequest, UnsupportedMediaType
from protos.hints import nearest
from router.http.body_validation import TOO_DEEP, Body, read_json, whole_ids
from router.http.middleware import find_header, received_body
from router.http.size_limits import check_sizes
from router.text.model_card import RANGES, ModelCard
from router.text.sampling_request import SamplingRequest

MAX_TTFT_MS = "x-baton-max-ttft-ms"
MAX_NAME_CHARS = 100  # names that an answer repeats

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


def with_bound(sampling: SamplingRequest, request: Request) -> SamplingRequest:
    """Adds the `max_ttft_ms` of a header; the body takes precedence."""
    header = find_header(request.scope, MAX_TTFT_MS.encode())
    if header is None:
        return sampling
    low, high = RANGES["max_ttft_ms"]
    with suppress(ValueError):
        if low <= (bound := float(header)) <= high:
            return replace(sampling, max_ttft_ms=bound) if sampling.max_ttft_ms is None else sampling
    problem = f"The header '{MAX_TTFT_MS}' is {header[:60]!r}"
    raise InvalidRequest(f"{problem}: it must be a number of milliseconds from {low} to {high}", param="max_ttft_ms")


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
    """The first error. In a list of parts, the wrong part is named, not the alternative that it is no string."""
    errors = error.errors(include_url=False, include_context=False)
    first = max(errors, key=lambda one: sum(_PARTS.match(str(step)) is not None for step in one["loc"][:-1]))
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
            return "a list" if value else "an empty list"
        case str():
            return f"the string {value[:60]!r}{'...' if len(value) > 60 else ''}"
        case _:
            return f"{value!r}"
