"""Validation shared by all request bodies and the objects in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core.core_schema import CoreSchema, tagged_union_schema

from router.http.harmless import Harmless, without_harmless
from router.http.size_limits import check_parameters
from router.text.model_card import RANGES, allowed


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
    """One wrong item refuses a list: pydantic would note all of them, for seconds."""

    __hash__ = object.__hash__  # a member of a union must have one, and pydantic's own has none


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
        check_parameters(value)  # pydantic would note every unknown one of a megabyte of them
        whole = {name: int(one) for name, one in value.items() if isinstance(one, float) and _is_exact(one)}
        return value | {name: one for name, one in whole.items() if cls._is_integer(name)} if whole else value

    @classmethod
    def _is_integer(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        return field is not None and field.annotation in (int, int | None)


class OpenBody(Body):
    """Fields that are not listed are accepted: clients send those of their API's latest version."""

    model_config = ConfigDict(extra="allow")


class OtherPart(OpenBody):
    """A part of a kind that is not listed, which its reader skips or refuses."""

    type: Any = None
    role: Any = None


class ByKind:
    """The members of a union of parts are told apart by the value of a field; an `OtherPart` takes all other values."""

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
