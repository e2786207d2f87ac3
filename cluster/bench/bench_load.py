"""The requests of a run and when to send them: values made from lengths, a rate and a seed, or from a recorded trace.

A prompt is a row of spans. Spans with the same key begin with the same tokens, so equal leading spans are a shared
prefix.
"""

from __future__ import annotations

import json
import math
import random
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from protos.errors import Misconfigured
from protos.hints import unusable

TRACE_BLOCK = 512
"""Prompt tokens that one of a trace's hash_ids stands for."""
MAX_FACTOR = 1e6
_TRACE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_GIVE_ALL = f"give {', '.join(_TRACE_FIELDS[:-1])} and {_TRACE_FIELDS[-1]}"

Key = tuple[int, int]
_OWN, _TRACED = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSpan:
    key: Key
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadItem:
    """One request; sent `due_s` after the start, or (None) when a slot is free."""

    index: int
    spans: tuple[PrefixSpan, ...]
    num_output: int
    due_s: float | None = None

    @property
    def num_prompt(self) -> int:
        return sum(span.num_tokens for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens, uniform from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, *, param: str) -> Lengths:
        """From "256" or "100:200". Raises Misconfigured."""
        low, colon, high = text.partition(":")
        try:
            made = cls(low=int(low), high=int(high if colon else low))
        except ValueError:
            made = cls(low=0, high=0)
        if not 1 <= made.low <= made.high:
            raise Misconfigured(
                f"{param} {shlex.quote(text)}: give a number of tokens, such as 256, or a range, such as 100:200",
                param=param.lstrip("-"),
            )
        return made

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def synthetic(num_requests: int, *, prompts: Lengths, outputs: Lengths, seed: int) -> list[WorkloadItem]:
    """Prompts that share no prefix."""
    rng = random.Random(seed)
    return [
        WorkloadItem(
            index=i, spans=(PrefixSpan(key=(_OWN, i), num_tokens=prompts.draw(rng)),), num_output=outputs.draw(rng)
        )
        for i in range(num_requests)
    ]


def with_poisson_arrivals(items: Sequence[WorkloadItem], rate: float, seed: int) -> list[WorkloadItem]:
    """The same requests at `rate` a second on average with exponential gaps; the first is due immediately."""
    if not rate > 0:
        raise Misconfigured(f"--rate {rate}: give requests a second, above 0", param="rate")
    rng = random.Random(f"{seed} arrivals")
    due_s, timed = 0.0, []
    for item in items:
        timed.append(replace(item, due_s=due_s))
        due_s += rng.expovariate(rate)
    return timed


def without_arrivals(items: Sequence[WorkloadItem]) -> list[WorkloadItem]:
    return [replace(item, due_s=None) for item in items]


def read_trace(path: Path, *, limit: int | None = None, scale: float = 1.0, speed: float = 1.0) -> list[WorkloadItem]:
    """Requests of a trace in Mooncake's format, with arrivals from 0 on. Raises Misconfigured, naming the line.

    One JSON object a line: `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`, one for each
    512 tokens of the prompt, equal where prefixes are. Lengths are multiplied by `scale`; time runs `speed` times.
    """
    for param, value in (("trace-scale", scale), ("trace-speed", speed)):
        if not 1 / MAX_FACTOR <= value <= MAX_FACTOR:
            raise Misconfigured(
                f"--{param} {value}: give a number from {1 / MAX_FACTOR:f} to {MAX_FACTOR:,.0f}", param=param
            )
    lines = list(_traced(path, limit))
    if not lines:
        raise Misconfigured(f"trace {path}: there is no request in it: give a line for each", param="trace")
    start = lines[0]["timestamp"]
    return [
        WorkloadItem(
            index=index,
            spans=_spans(line, scale),
            num_output=max(1, round(line["output_length"] * scale)),
            due_s=(line["timestamp"] - start) / 1000 / speed,
        )
        for index, line in enumerate(lines)
    ]


def _traced(path: Path, limit: int | None) -> Iterator[dict[str, Any]]:
    """The trace's lines, checked, by time."""
    before = -float("inf")
    try:
        with path.open(encoding="utf-8") as lines:
            for number, text in enumerate(lines, 1):
                if limit is not None and number > limit:
                    return
                line = _checked(text, f"trace {path}, line {number}")
                if line["timestamp"] < before:
                    raise Misconfigured(
                        f"trace {path}, line {number}: its timestamp {line['timestamp']} is before the last line's "
                        f"{before}: sort the lines by time",
                        param="trace",
                    )
                before = line["timestamp"]
                yield line
    except (OSError, UnicodeDecodeError) as error:
        why = unusable(error) if isinstance(error, OSError) else f"it is not UTF-8 text: {error}"
        raise Misconfigured(f"trace {path}: {why}", param="trace") from error


def _checked(text: str, where: str) -> dict[str, Any]:
    if not text.strip():
        raise Misconfigured(f"{where}: it is blank: leave it out", param="trace")
    try:
        line = json.loads(text)
    except ValueError as error:
        fault = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise Misconfigured(
            f"{where}: {text.strip()[:40]!r} is not JSON ({fault}): give an object", param="trace"
        ) from None
    if (why := _unusable(line)) is not None:
        raise Misconfigured(f"{where}: {why}", param="trace")
    return dict(line)


def _unusable(line: Any) -> str | None:
    """Why a line is no valid request: the field, its value, and what is allowed."""
    if not isinstance(line, dict):
        return f"{str(line)[:40]!r} is not an object: {_GIVE_ALL}"
    for name in _TRACE_FIELDS:
        if name not in line:
            return f"there is no {name}: {_GIVE_ALL}"
    at_ms = line["timestamp"]
    if type(at_ms) not in (int, float) or not 0 <= at_ms < math.inf:
        return f"timestamp is {at_ms!r}: give a number from 0 on"
    for name in ("input_length", "output_length"):
        value = line[name]
        if type(value) is not int or value < 1:
            return f"{name} is {value!r}: give a whole number from 1 on"
    ids = line["hash_ids"]
    if not isinstance(ids, list):
        return f"hash_ids is {str(ids)[:40]!r}: give a list of numbers"
    for one in ids:
        if type(one) is not int or one < 0:
            return f"hash_ids holds {one!r}: give whole numbers from 0 on"
    if len(ids) != (num := math.ceil(line["input_length"] / TRACE_BLOCK)):
        return f"{len(ids)} hash_ids for {line['input_length']} tokens: give {num}, one for each {TRACE_BLOCK}"
    return None


def _spans(line: dict[str, Any], scale: float) -> tuple[PrefixSpan, ...]:
    """A span for each hash id; all but the last have the same length."""
    ids = line["hash_ids"]
    block = max(1, round(TRACE_BLOCK * scale))
    rest = line["input_length"] - (len(ids) - 1) * TRACE_BLOCK
    last = min(block, max(1, round(rest * scale)))
    return tuple(
        PrefixSpan(key=(_TRACED, one), num_tokens=last if place == len(ids) - 1 else block)
        for place, one in enumerate(ids)
    )


def fitting(items: Sequence[WorkloadItem], max_model_len: int | None) -> tuple[list[WorkloadItem], int]:
    """The requests that fit into the model's context, and the number of those that do not. Raises Misconfigured if none
    fits."""
    if max_model_len is None:
        return list(items), 0
    kept = [item for item in items if item.num_prompt + item.num_output <= max_model_len]
    if items and not kept:
        shortest = min(item.num_prompt + item.num_output for item in items)
        raise Misconfigured(
            f"every request is longer (the shortest: {shortest} tokens, prompt and answer) than the model's context "
            f"of {max_model_len}: lower --input-len, --output-len or --trace-scale"
        )
    return kept, len(items) - len(kept)
