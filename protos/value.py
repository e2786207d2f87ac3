"""The base of values that are made for every token, row or message (docs/adr/0025): a msgspec struct.

Making one takes a tenth of a microsecond, a frozen dataclass one or two, and Python's garbage collector never scans it:
a value holds no reference that could lead back to it. `dataclasses.replace` and `asdict`, the names and types of
`fields`, orjson and type checkers treat it as a dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import get_annotations
from typing import Any

from msgspec import Struct


class Value(Struct, frozen=True, gc=False, array_like=True):
    """A frozen, slotted value that is compared and hashed by its fields. Subclasses derive from it directly: `class
    Row(Value, frozen=True, kw_only=True)`. A subclass of a subclass raises TypeError. `protos.codec` writes its fields
    in their order, without their names."""

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        if cls.__bases__ != (Value,):
            raise TypeError(f"{cls.__name__} derives from another value: write its fields down, each value has its own")
        annotated = type(cls.__name__, (), {"__annotations__": get_annotations(cls)})
        described: Any = dataclass(init=False, repr=False, eq=False)(annotated)
        cls.__dataclass_fields__ = described.__dataclass_fields__
