"""Measures NVIDIA Dynamo's prefix index with our workload, in a Python that has `ai-dynamo-runtime`.

Its block names are 64 bits; events enter as JSON, which is counted, for there is no other way in. Prints one
JSON object.
"""

from __future__ import annotations

import gc
import importlib
import json
from functools import partial
from importlib import metadata
from typing import Any

from benchmarks.routing.prefix_workload import (
    BLOCK_SIZE,
    LENGTHS,
    NUM_BLOCKS,
    NUM_MANY,
    NUM_TOKENS,
    NUM_WORKERS,
    best_s,
    latencies_us,
    make,
    many_chains,
    resident_bytes,
    tokens_per_s,
)  # fmt: skip


def stored(names: list[int], number: int) -> bytes:
    blocks = [{"block_hash": name, "tokens_hash": name} for name in names]
    return json.dumps(
        {"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 0}
    ).encode()


def named(packed: bytes) -> list[int]:
    """The first half of each name."""
    return [int.from_bytes(packed[start : start + 8], "little") for start in range(0, len(packed), 16)]


def _match(tree: Any, prompts: list[list[int]], number: int) -> object:
    return tree.find_matches(prompts[number]).scores


def main() -> None:
    core: Any = importlib.import_module("dynamo._core")
    work = make(NUM_BLOCKS, NUM_WORKERS)
    events = [(one.worker, stored(named(b"".join(one.hashes)), n)) for n, one in enumerate(work.held)]

    def filled() -> Any:
        tree = core.RadixTree()
        for worker, event in events:
            tree.apply_event(worker, event)
        tree.find_matches([0])  # returns when all events have been applied
        return tree

    gc.freeze()
    applied_s, tree = best_s(filled, 3), filled()
    short = [named(b"".join(prompt)) for prompt in work.short_prompts]
    long = [named(b"".join(prompt)) for prompt in work.long_prompts]
    figures: dict[str, Any] = {
        "version": metadata.version("ai-dynamo-runtime"),
        "applied_per_s": work.num_entries / applied_s,
        "match_80": latencies_us(partial(_match, tree, short), len(short)),
        "match_by_length": {
            length: latencies_us(partial(_match, tree, [prompt[:length] for prompt in long]), len(long))
            for length in LENGTHS
        },
    }
    events.clear()
    del tree, work
    gc.collect()
    tokens = list(range(NUM_TOKENS))
    figures["hash_ids_per_s"] = tokens_per_s(lambda: core.compute_block_hash_for_seq(tokens, BLOCK_SIZE), NUM_TOKENS)
    tree, before = core.RadixTree(), resident_bytes()
    for number, (worker, packed) in enumerate(many_chains(NUM_MANY, NUM_WORKERS)):
        tree.apply_event(worker, stored(named(packed), number))
        if number % 1000 == 0:
            tree.find_matches([0])  # lets it keep up, so that no queue of events is counted
    tree.find_matches([0])
    figures["bytes_per_entry"] = (resident_bytes() - before) / NUM_MANY
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
