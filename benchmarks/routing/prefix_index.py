"""Compares the prefix index and block hash with plain Python and NVIDIA Dynamo's radix tree.

    python -m benchmarks.routing.prefix_index --dynamo-python ENV/bin/python --redis redis://localhost:6379 \\
        --json figures.json --plot matches.svg

ENV has `ai-dynamo-runtime`. Matches are looked up among 1,000,000 blocks on 100 workers; memory is counted with ten
times as many.
Calls are timed from Python on both sides, one after the other, and each subject runs in another process.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.output import JsonFile, PlotFile, drawing, write_figures
from benchmarks.routing.prefix_workload import (
    BLOCK_SIZE,
    LENGTHS,
    NUM_BLOCKS,
    NUM_MANY,
    NUM_TOKENS,
    NUM_WORKERS,
    PrefixWorkload,
    best_s,
    latencies_us,
    make,
    many_chains,
    resident_bytes,
    tokens_per_s,
)  # fmt: skip
from kvtransfer import hashing
from kvtransfer.hashing import chain_hashes
from protos.chain import Chain
from protos.kv_pb2 import KVEvents as Message
from protos.values import BlockStored, KVEvents
from protos.wire import from_proto, to_proto
from router.prefix.index import PrefixIndex
from router.prefix.memory_index import MemoryPrefixIndex
from router.prefix.redis_index import RedisFeed
from router.prefix.redis_store import Store
from router.prefix.redis_url import parse
from router.prefix.registry import local_index
from router.prefix.table_index import TablePrefixIndex

SUBJECTS: dict[str, Callable[[], PrefixIndex]] = {"tables": TablePrefixIndex, "plain Python": MemoryPrefixIndex}
"""By names; plain Python hashes without compiled code."""
PATIENCE_S = 60.0


def measure(name: str) -> dict[str, Any]:
    """All figures of one of our own. Events come as bytes, as a worker sends them, and decoding is counted."""
    make_index = SUBJECTS[name]
    work = make(NUM_BLOCKS, NUM_WORKERS)
    sent = [(f"w{one.worker}", _sent(Chain.of(one.hashes), number)) for number, one in enumerate(work.held)]

    def filled() -> PrefixIndex:
        index = make_index()
        for worker, packed in sent:
            index.apply(worker, from_proto(KVEvents, Message.FromString(packed)).events)
        return index

    gc.freeze()
    applied_s, index = best_s(filled, 3), filled()
    figures = {"applied_per_s": work.num_entries / applied_s} | _matches(index, work)
    sent.clear()
    del index, work
    gc.collect()
    tokens = tuple(range(NUM_TOKENS))
    library = hashing.compiled() if name == "tables" else None
    with patch.object(hashing, "compiled", lambda: library):
        figures["hash_ids_per_s"] = tokens_per_s(lambda: chain_hashes(tokens, BLOCK_SIZE), NUM_TOKENS)
    index, before = make_index(), resident_bytes()
    for number, chain in many_chains(NUM_MANY, NUM_WORKERS):
        index.apply(f"w{number}", (BlockStored(hashes=Chain(chain)),))
    figures["bytes_per_entry"] = (resident_bytes() - before) / NUM_MANY
    return figures


def _sent(chain: Chain, number: int) -> bytes:
    message = to_proto(KVEvents(incarnation=1, first_seq=number, events=(BlockStored(hashes=chain),)))
    packed: bytes = message.SerializeToString()
    return packed


def _matches(index: PrefixIndex, work: PrefixWorkload) -> dict[str, Any]:
    short = [Chain.of(prompt) for prompt in work.short_prompts]
    by_length = {}
    for length in LENGTHS:
        long = [Chain.of(prompt[:length]) for prompt in work.long_prompts]
        by_length[length] = latencies_us(lambda number, asked=long: index.match(asked[number], now=0.0), len(long))  # type: ignore[misc]
    return {
        "match_80": latencies_us(lambda number: index.match(short[number], now=0.0), len(short)),
        "match_by_length": by_length,
    }


async def warm_s(url: str) -> float:
    """Seconds until a new gateway knows what another one has received of 1,000,000 blocks on 100 workers."""

    def gateway(gateway_id: str) -> RedisFeed:
        store = Store(parse(url, setting="redis").client(timeout_s=2.0), model="benchmark", gateway_id=gateway_id)
        return RedisFeed(local_index(), store)

    held: dict[str, list[BlockStored]] = {}
    for one in make(NUM_BLOCKS, NUM_WORKERS).held:
        held.setdefault(f"w{one.worker}", []).append(BlockStored(hashes=Chain.of(one.hashes)))
    feed = gateway("first")
    await feed.start()
    for worker_id, events in held.items():
        feed.hello(worker_id, 1)
        feed.receive(worker_id, KVEvents(incarnation=1, first_seq=1, events=tuple(events), snapshot=True))
    async with asyncio.timeout(PATIENCE_S):
        while not all(feed.writes_for(worker_id) for worker_id in held):  # noqa: ASYNC110 - in many places
            await asyncio.sleep(0.01)
    spent = []
    for number in range(3):
        late = gateway(f"late-{number}")
        start = time.perf_counter()
        await late.start()
        spent.append(time.perf_counter() - start)
        assert all(late.index.num_blocks(worker_id) == feed.index.num_blocks(worker_id) for worker_id in held)
        await late.close()
    await feed.close()
    return min(spent)


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    with drawing(path, size=(6.4, 4)) as [[axes]]:
        for name, figures in found.items():
            by_length = figures["match_by_length"]
            axes.plot(
                [int(n) for n in by_length], [one["p99_us"] for one in by_length.values()], marker="o", label=name
            )
        axes.set(xscale="log", yscale="log", xlabel="blocks in the prompt", ylabel="match, p99, microseconds")
        axes.set_title(f"{NUM_BLOCKS:,} blocks on {NUM_WORKERS} workers", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend()


def show(found: dict[str, dict[str, Any]]) -> None:
    table = Table("", *found)
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "match, 80 blocks, p50 / p99, us": lambda figures: _pair(figures["match_80"]),
        "match, 2,048 blocks, p50 / p99, us": lambda figures: _pair(figures["match_by_length"]["2048"]),
        "event blocks applied, million/s": lambda figures: f"{figures['applied_per_s'] / 1e6:.2f}",
        "bytes a block and worker, 10 million": lambda figures: f"{figures['bytes_per_entry']:.0f}",
        "hash, blocks of 16, of a tuple or list, million tokens/s": lambda figures: (
            f"{figures['hash_ids_per_s'] / 1e6:.0f}"
        ),
    }
    for title, row in rows.items():
        table.add_row(title, *(row(figures) for figures in found.values()))
    Console().print(table)


def _pair(figures: dict[str, float]) -> str:
    return f"{figures['p50_us']:.1f} / {figures['p99_us']:.1f}"


def _apart(python: str, *arguments: str) -> dict[str, Any]:
    """The JSON that another process prints last."""
    ran = subprocess.run([python, "-m", *arguments], check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return figures


def main(
    dynamo_python: Annotated[str, typer.Option(help="An interpreter that has ai-dynamo-runtime.")] = "",
    redis: Annotated[str, typer.Option(help="URL of a Redis that may be written to.")] = "",
    json_file: JsonFile = None,
    plot: PlotFile = None,
    only: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    if only:
        print(json.dumps(measure(only)))
        return
    found = {name: _apart(sys.executable, "benchmarks.routing.prefix_index", "--only", name) for name in SUBJECTS}
    if dynamo_python:
        found["Dynamo"] = _apart(dynamo_python, "benchmarks.peers.dynamo_index")
    show(found)
    figures: dict[str, Any] = {"found": found}
    if redis:
        figures["warm_s"] = asyncio.run(warm_s(redis))
        print(f"a gateway is warm from Redis after {figures['warm_s']:.2f} s")
    write_figures(json_file, **figures)
    if plot is not None:
        draw(found, plot)


if __name__ == "__main__":
    typer.run(main)
