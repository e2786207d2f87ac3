"""The requests of a run and when to send them, made from a seed or read from a trace.

A prompt is a row of spans. Spans with the same key begin with the same tokens, so equal leading spans are a shared
prefix.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from cluster.config.scenario import WorkloadTable
from protos.errors import Misconfigured
from protos.hints import unusable

TRACE_BLOCK = 512
"""Prompt tokens that one of a trace's hash_ids stands for."""
_Tokens = Annotated[int, Meta(ge=1)]

Key = tuple[int, int]
_OWN, _TRACED = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSpan:
    key: Key
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadItem:
    """Sent `due_s` after the start, or (None) when a slot is free."""

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
    def parse(cls, text: int | str, *, param: str) -> Lengths:
        """Parses 256 or "100:200". Raises Misconfigured."""
        low, colon, high = str(text).partition(":")
        try:
            made = cls(low=int(low), high=int(high if colon else low))
        except ValueError:
            made = cls(low=0, high=0)
        if not 1 <= made.low <= made.high:
            raise Misconfigured(
                f"{param} = {text!r}: give a number of tokens, such as 256, or a range, such as '100:200'", param=param
            )
        return made

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


class TraceLine(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, Meta(ge=0)]  # milliseconds
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[Annotated[int, Meta(ge=0)]]


def items_of(workload: WorkloadTable, seed: int) -> list[WorkloadItem]:
    """Raises Misconfigured."""
    if workload.trace:
        scale, speed = workload.trace_scale, workload.trace_speed
        return read_trace(Path(workload.trace), limit=workload.requests, scale=scale, speed=speed)
    if workload.name != "poisson" or workload.requests is None:
        raise Misconfigured(
            f"workload.name = {workload.name!r} is for simulations: give 'poisson' or workload.trace",
            param="workload.name",
        )
    prompts = Lengths.parse(workload.input_len, param="workload.input_len")
    outputs = Lengths.parse(workload.output_len, param="workload.output_len")
    items = synthetic(workload.requests, prompts=prompts, outputs=outputs, seed=seed)
    return with_poisson_arrivals(items, workload.rate, seed)


def synthetic(num_requests: int, *, prompts: Lengths, outputs: Lengths, seed: int) -> list[WorkloadItem]:
    rng = random.Random(seed)
    return [
        WorkloadItem(
            index=i, spans=(PrefixSpan(key=(_OWN, i), num_tokens=prompts.draw(rng)),), num_output=outputs.draw(rng)
        )
        for i in range(num_requests)
    ]


def with_poisson_arrivals(items: Sequence[WorkloadItem], rate: float, seed: int) -> list[WorkloadItem]:
    """The first request is due immediately."""
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

    `hash_ids` has one id for each 512 tokens of the prompt; equal prefixes have equal ids. `scale` multiplies lengths;
    time runs `speed` times as fast."""
    lines = list(_traced(path, limit))
    if not lines:
        raise Misconfigured(f"trace {path}: there is no request in it: give a line for each", param="trace")
    start = lines[0].timestamp
    return [
        WorkloadItem(
            index=index,
            spans=_spans(line, scale),
            num_output=max(1, round(line.output_length * scale)),
            due_s=(line.timestamp - start) / 1000 / speed,
        )
        for index, line in enumerate(lines)
    ]


def _traced(path: Path, limit: int | None) -> Iterator[TraceLine]:
    before = 0.0
    try:
        with path.open("rb") as lines:
            for number, text in enumerate(islice(lines, limit), 1):
                line = _checked(text, f"trace {path}, line {number}")
                if line.timestamp < before:
                    raise Misconfigured(
                        f"trace {path}, line {number}: its timestamp {line.timestamp} is before the last line's "
                        f"{before}: sort the lines by time",
                        param="trace",
                    )
                before = line.timestamp
                yield line
    except OSError as error:
        raise Misconfigured(f"trace {path}: {unusable(error)}", param="trace") from error


def _checked(text: bytes, where: str) -> TraceLine:
    try:
        line = msgspec.json.decode(text, type=TraceLine)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fields = ", ".join(TraceLine.__struct_fields__)
        raise Misconfigured(f"{where}: {error}: give an object with {fields}", param="trace") from None
    if len(line.hash_ids) != (num := math.ceil(line.input_length / TRACE_BLOCK)):
        raise Misconfigured(
            f"{where}: {len(line.hash_ids)} hash_ids for {line.input_length} tokens: give {num}, one for each "
            f"{TRACE_BLOCK}",
            param="trace",
        )
    return line


def _spans(line: TraceLine, scale: float) -> tuple[PrefixSpan, ...]:
    ids = line.hash_ids
    block = max(1, round(TRACE_BLOCK * scale))
    rest = line.input_length - (len(ids) - 1) * TRACE_BLOCK
    last = min(block, max(1, round(rest * scale)))
    return tuple(
        PrefixSpan(key=(_TRACED, block_id), num_tokens=last if place == len(ids) - 1 else block)
        for place, block_id in enumerate(ids)
    )


def fitting(items: Sequence[WorkloadItem], max_model_len: int | None) -> tuple[list[WorkloadItem], int]:
    """Returns the requests that fit into the model's context, and the number of others. Raises Misconfigured if none
    fits."""
    if max_model_len is None:
        return list(items), 0
    fits = [item for item in items if item.num_prompt + item.num_output <= max_model_len]
    if items and not fits:
        shortest = min(item.num_prompt + item.num_output for item in items)
        raise Misconfigured(
            f"every request is longer (the shortest: {shortest} tokens, prompt and answer) than the model's context "
            f"of {max_model_len}: lower workload.input_len, output_len or trace_scale",
            param="workload.input_len",
        )
    return fits, len(items) - len(fits)
