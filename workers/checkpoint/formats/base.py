"""What every format of quantised weights is read into, and how a format refuses."""

from __future__ import annotations

import re
from typing import Protocol

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.fields import Fields

_MAX_REPEATS = 5  # of a pattern: matching a name of 60 letters stays below a million steps
_MAX_PATTERN = 512


class WeightFormat(Protocol):
    """How a checkpoint's linear weights are stored, by its quantization_config."""

    @property
    def label(self) -> str:
        """For people and fingerprints: method, bits and what else decides the weights' values."""
        ...

    @property
    def encodings(self) -> str:
        """The function, as module:name, from this value and a `WeightSource` to `WeightEncodings`. It loads torch."""
        ...


def refuse_format(config: Fields, field: str, served: str, *, fix: str = "") -> UnsupportedModel:
    """The error for a `field` whose value is not served."""
    fix = fix or "Give --model a checkpoint in a served format, or the one that it was made from"
    return UnsupportedModel(
        f"{config.where}: {field} is {config.raw(field)!r}, which is not served: {served}. {fix}", param=field
    )


def require_value(config: Fields, field: str, served: tuple[object, ...], default: object = None) -> None:
    """Raises UnsupportedModel for a value that is not among the served; null and absence are the default."""
    value = config.raw(field)
    if field in config and value != default and not any(value == one and type(value) is type(one) for one in served):
        raise refuse_format(config, field, f"it must be {' or '.join(repr(one) for one in served)}")


def bits_of(config: Fields, served: tuple[int, ...], field: str = "bits", default: int | None = None) -> int:
    bits = config.integer(field) if default is None else config.integer_or(field, default)
    if bits not in served:
        raise refuse_format(config, field, f"codes of {', '.join(map(str, served))} bits are")
    return bits


def group_size_of(config: Fields, field: str = "group_size", default: int | None = None) -> int | None:
    """Inputs of a group; None: all inputs are one group, written as -1. Raises BadCheckpoint."""
    if config.raw(field) == -1:
        return None
    size = config.integer(field) if default is None else config.integer_or(field, default)
    return min(size, 1 << 31)


def group_label(group_size: int | None) -> str:
    return "" if group_size is None else f"-g{group_size}"


def check_pattern(pattern: str, config: Fields) -> None:
    """Raises BadCheckpoint for a regular expression that is none, UnsupportedModel for one that could match for ever:
    it repeats a group, or has too many repetitions."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadCheckpoint(f"{config.where}: {pattern!r} is no regular expression ({error})") from None
    if (
        re.search(r"\)[*+{]", pattern)
        or len(re.findall("[*+{]", pattern)) > _MAX_REPEATS
        or len(pattern) > _MAX_PATTERN
    ):
        raise UnsupportedModel(
            f"{config.where}: the pattern {pattern!r} is not served: it may have {_MAX_PATTERN} letters, repeat "
            f"{_MAX_REPEATS} times, and repeat no group. Write it as several patterns"
        )
