"""Describes a load: lengths, conversations, and the share of prompt tokens that earlier prompts had.

    python -m benchmarks.routing.workload_shape conversation_trace.jsonl --requests 4000
    python -m benchmarks.routing.workload_shape --workload assistant --requests 4000 --seed 1

A request goes on with a conversation if its prompt begins with all full blocks of that one's last prompt, two at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

from benchmarks.routing.replay import TraceRequest
from benchmarks.routing.trace import BLOCK_SIZE, asked_for
from cluster.simulate.world.simulated_load import GENERATED
from protos.values import BlockHash

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """`pauses_s` and `added` (tokens, beside the answer before them) are of turns that continue with a conversation,
    `firsts` the tokens of the other prompts. `repeated`: the share of all tokens that an earlier prompt had."""

    prompts: Sequence[float]
    answers: Sequence[float]
    firsts: Sequence[float]
    added: Sequence[float]
    pauses_s: Sequence[float]
    repeated: float


def shape_of(requests: Sequence[TraceRequest], block_size: int = BLOCK_SIZE) -> LoadShape:
    seen: set[BlockHash] = set()
    last: dict[BlockHash, TraceRequest] = {}  # by the last full block of its prompt
    firsts, added, pauses_s, num_repeated = list[float](), list[float](), list[float](), 0
    for one in requests:
        num_repeated += block_size * sum(block in seen for block in one.hashes)
        seen.update(one.hashes)
        before = next((last[block] for block in reversed(one.hashes[1:]) if block in last), None)
        if before is None:
            firsts.append(one.num_prompt)
        else:
            added.append(one.num_prompt - before.num_prompt - before.num_output)
            pauses_s.append(one.at_s - before.at_s)
        if len(one.hashes) > 1:
            last[one.hashes[-1]] = one
    prompts = [float(one.num_prompt) for one in requests]
    return LoadShape(
        prompts=prompts,
        answers=[float(one.num_output) for one in requests],
        firsts=firsts,
        added=added,
        pauses_s=pauses_s,
        repeated=num_repeated / sum(prompts),
    )


def quantiles(values: Sequence[float]) -> str:
    """Their mean, and the value at each of SHARES."""
    ordered = sorted(values) or [0.0]
    points = [f"{ordered[min(len(ordered) - 1, int(share * len(ordered)))]:,.0f}" for share in SHARES]
    return f"| {mean(ordered):,.0f} | {' | '.join(points)} |"


def shape(
    trace: Annotated[Path | None, typer.Argument(help="A trace in Mooncake's format.")] = None,
    workload: Annotated[str | None, typer.Option(help=f"Instead: {', '.join(GENERATED)}.")] = None,
    num_requests: Annotated[int, typer.Option("--requests", help="Of a trace the first, of a workload all.")] = 4000,
    rate: Annotated[float, typer.Option(help="A workload's requests a second.")] = 3.4,
    seed: Annotated[int, typer.Option(help="A workload's.")] = 0,
) -> None:
    """A Markdown table on stdout."""
    found = shape_of(asked_for(trace, workload, num_requests=num_requests, rate=rate, seed=seed))
    typer.echo("| | mean | " + " | ".join(f"p{share * 100:g}" for share in SHARES) + " |\n" + "|---" * 8 + "|")
    for name, values in (
        ("tokens of a prompt", found.prompts), ("of an answer", found.answers), ("of a first prompt", found.firsts),
        ("added by a further one", found.added), ("seconds since the one before", found.pauses_s),
    ):  # fmt: skip
        typer.echo(f"| {name} {quantiles(values)}")
    typer.echo(f"\n{len(found.firsts):,} conversations; earlier prompts had {found.repeated:.0%} of the tokens")


if __name__ == "__main__":
    typer.run(shape)
