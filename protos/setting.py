"""A setting is declared once, as a field of a frozen dataclass: `name: type = setting(default, help, bounds)`.

Its check and error are made from that here; its TOML key, `--set` path, flag, help text and row in docs/settings.md in
`cluster.config`. A field of a configuration without `setting` is a constant: no operator has a reason to change it,
tests and simulations have.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal

from protos.errors import Misconfigured
from protos.hints import nearest

_UNITS = {"_s": "seconds", "_ms": "milliseconds", "_bytes": "bytes", "_gib": "GiB", "_tokens": "tokens"}
_OR_MORE = " or more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`kind` is its type without None. The bounds `least` and `most` are allowed, `above` and `below` are not."""

    name: str
    kind: Any
    default: Any
    help: str
    unit: str
    flag: str  # the flag, if it differs from the name
    variable: str  # of the environment
    least: float | None
    most: float | None
    above: float | None
    below: float | None

    @property
    def choices(self) -> tuple[str, ...]:
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()

    @property
    def range(self) -> str:
        """In words; "" if every value of the type is allowed."""
        if self.choices:
            return ", ".join(self.choices)
        low = f"from {number(self.least)}" if self.least is not None else ""
        low = f"above {number(self.above)}" if self.above is not None else low
        if self.most is not None:
            return f"{low} to {number(self.most)}" if self.above is None else f"{low}, at most {number(self.most)}"
        if self.below is not None and self.below < math.inf:
            return f"{low}, below {number(self.below)}"
        return low if self.least is None else number(self.least) + _OR_MORE

    def check(self, value: Any) -> None:
        """Raises Misconfigured, with the name as the class has it."""
        if self.choices and value not in self.choices:
            near = nearest(str(value), self.choices)
            hint = f"did you mean {near!r}? " if near else ""
            raise Misconfigured(f"{self.name} = {value!r}: {hint}choose one of {self.range}", param=self.name)
        if isinstance(value, int | float) and not self._holds(value):
            wanted = self.range if self.range.endswith(_OR_MORE) else f"a number {self.range}"
            raise Misconfigured(f"{self.name} = {value}: give {wanted}", param=self.name)

    def _holds(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


def setting(default: Any, help: str, *, repr: bool = True, **declared: Any) -> Any:
    """A field of a configuration; `declared`: fields of Setting. By default the name's end gives the unit."""
    return field(default=default, repr=repr, metadata={"help": help, **declared})


@cache
def _settings_of(config: type[Any]) -> Mapping[str, Setting]:
    kinds = typing.get_type_hints(config)
    return {
        spec.name: Setting(
            name=spec.name,
            kind=_without_none(kinds[spec.name]),
            default=spec.default,
            help=spec.metadata["help"],
            unit=spec.metadata.get("unit")
            or next((unit for end, unit in _UNITS.items() if spec.name.endswith(end)), ""),
            flag=spec.metadata.get("flag", ""),
            variable=spec.metadata.get("variable", ""),
            **{bound: spec.metadata.get(bound) for bound in ("least", "most", "above", "below")},
        )
        for spec in fields(config)
        if "help" in spec.metadata
    }


def settings_of(config: Any) -> Mapping[str, Setting]:
    return _settings_of(config)


def check_settings(config: object) -> None:
    """Raises Misconfigured for a value outside its setting's range, NaN included."""
    for name, declared in settings_of(type(config)).items():
        if (value := getattr(config, name)) is not None:
            declared.check(value)


class CheckedSettings:
    """A configuration that refuses values outside its settings' ranges. Raises Misconfigured."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_settings(self)


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (kind,) = (choice for choice in typing.get_args(kind) if choice is not types.NoneType)
    return kind


def number(value: float | None) -> str:
    """In the usual notation: 16777216, 0.5, 30."""
    return str(int(value)) if value is not None and value == int(value) else f"{value}"
