"""Reads one JSON object of a model field by field. What is missing or of the wrong type is named with its file."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.files_seam import ModelFiles

D = TypeVar("D")


class Fields:
    """A JSON object. null counts as absent; every getter raises BadCheckpoint for a value it cannot accept."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self._data = data
        self.where = where

    @classmethod
    def of_file(cls, files: ModelFiles, name: str) -> Fields:
        """Raises BadCheckpoint when the file is missing, truncated or not an object."""
        data = files.json(name)
        if data is None:
            raise BadCheckpoint(
                f"{files.where(name)} does not exist: give the folder of a Hugging Face checkpoint, which holds {name}"
            )
        return cls(data, files.where(name))

    def __contains__(self, key: str) -> bool:
        return self._data.get(key) is not None

    def has_null(self, key: str) -> bool:
        return key in self._data and self._data[key] is None

    def over(self, defaults: Mapping[str, Any]) -> Fields:
        """These fields, with `defaults` for absent ones. null is not absent."""
        return Fields({**defaults, **self._data}, self.where)

    def replaced(self, **values: Any) -> Fields:
        return Fields({**self._data, **values}, self.where)

    def names(self) -> tuple[str, ...]:
        return tuple(self._data)

    def raw(self, key: str) -> Any:
        return self._data.get(key)

    def inner(self, key: str) -> Fields:
        """The object under `key`; empty when absent."""
        value = self._data.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value or {}, f"{self.where}: {key}")

    def integer(self, key: str, *, minimum: int = 1, maximum: float = math.inf) -> int:
        value = self._required(key)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.wrong(key, f"a whole number from {minimum}{f' to {maximum}' if maximum < math.inf else ''}")
        return value

    def integer_or(self, key: str, default: D, *, minimum: int = 1, maximum: float = math.inf) -> int | D:
        return self.integer(key, minimum=minimum, maximum=maximum) if key in self else default

    def number(self, key: str, *, above: float = 0.0) -> float:
        return self._as_number(key, self._required(key), above)

    def number_or(self, key: str, default: D, *, above: float = 0.0) -> float | D:
        return self.number(key, above=above) if key in self else default

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        values = self._required(key)
        if not isinstance(values, list) or len(values) != length:
            raise self.wrong(key, f"a list of {length} numbers")
        return tuple(self._as_number(key, value, 0.0) for value in values)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self._data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text_or(self, key: str, default: D) -> str | D:
        value = self._data.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        values = self._data.get(key) or []
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.wrong(key, "a list of strings")
        return tuple(values)

    def ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; empty when absent."""
        value = self._data.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise self.wrong(key, "a token id or a list of them")
        return tuple(values)

    def _required(self, key: str) -> Any:
        if key not in self:
            raise BadCheckpoint(f"{self.where}: {key!r} is missing: use the checkpoint's original file", param=key)
        return self._data[key]

    def _as_number(self, key: str, value: Any, above: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= sys.float_info.max:
            raise self.wrong(key, f"a number above {above:g}" if above > -math.inf else "a number")
        return float(value)

    def wrong(self, key: str, wanted: str, value: object = None) -> BadCheckpoint:
        """The error for a field that contradicts others. `value` is what absence makes of it."""
        return BadCheckpoint(f"{self.where}: {key!r} is {self._data.get(key, value)!r}: it must be {wanted}", param=key)

    def unserved(self, key: str, served: str, value: object = None, *, fix: str = "") -> UnsupportedModel:
        """The error for a field that would change what is computed. `value` is what absence makes of it."""
        fix = fix or "Give --model another checkpoint, or the one that it was made from"
        given = self._data.get(key, value)
        return UnsupportedModel(f"{self.where}: {key} is {given!r}, which is not served: {served}. {fix}", param=key)
