"""Chains of blocks on many workers, and prompts that ask for them: the same for our index and for a peer's.

Standard library only: a peer is measured by an interpreter of its own, which has none of our packages.

    workers x (short chains of 80 blocks, long ones of 2,048) ── all blocks distinct
    every long chain is also held by 8 other workers, to random depths: a prompt has many places where matches end
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

SHORT, LONG = 80, 2048
SHARERS = 8
LENGTHS = (16, 64, 256, 1024, 2048)
NUM_BLOCKS, NUM_WORKERS, NUM_MANY = 1_000_000, 100, 10_000_000
NUM_TOKENS, BLOCK_SIZE = 2**20, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldChain:
    """`hashes` is a chain from its root, held by `worker`."""

    worker: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixWorkload:
    held: tuple[HeldChain, ...]
    short_prompts: tuple[tuple[bytes, ...], ...]
    long_prompts: tuple[tuple[bytes, ...], ...]

    @property
    def num_entries(self) -> int:
        """(block, worker) pairs."""
        return sum(len(one.hashes) for one in self.held)


def make(num_blocks: int, num_workers: int, *, num_prompts: int = 2000, seed: int = 0) -> PrefixWorkload:
    """About `num_blocks` distinct blocks, a fifth of them in long chains where a worker has room for one."""
    rng = random.Random(seed)
    fresh = _fresh(seed)
    held: list[HeldChain] = []
    per_worker = num_blocks // num_workers
    num_long = -(-per_worker // 5 // LONG) if per_worker > LONG else 0
    long_chains: list[tuple[bytes, ...]] = []
    for worker in range(num_workers):
        for _ in range(num_long):
            chain = tuple(next(fresh) for _ in range(LONG))
            long_chains.append(chain)
            held.append(HeldChain(worker=worker, hashes=chain))
        held += [
            HeldChain(worker=worker, hashes=tuple(next(fresh) for _ in range(SHORT)))
            for _ in range((per_worker - num_long * LONG) // SHORT)
        ]
    short = [one.hashes for one in held if len(one.hashes) == SHORT]
    sharing = [
        HeldChain(worker=worker, hashes=chain[: rng.randrange(1, LONG)])
        for chain in long_chains[: max(1, num_blocks // 50_000)]
        for worker in rng.sample(range(num_workers), min(SHARERS, num_workers))
    ]
    shared = long_chains[: max(1, num_blocks // 50_000)]
    return PrefixWorkload(
        held=(*held, *sharing),
        short_prompts=tuple(rng.choice(short) for _ in range(num_prompts)),
        long_prompts=tuple(rng.choice(shared) for _ in range(num_prompts)) if shared else (),
    )


def many_chains(num_blocks: int, num_workers: int, *, seed: int = 1) -> Iterator[tuple[int, bytes]]:
    """(worker, packed hashes of a chain of 80 blocks), made as they are wanted: for more blocks than fit as objects."""
    rng = random.Random(seed)
    for number in range(num_blocks // SHORT):
        yield number % num_workers, rng.randbytes(SHORT * 16)


def tokens_per_s(hash_all: Callable[[], object], num_tokens: int) -> float:
    return num_tokens / best_s(hash_all, 15)


def best_s(work: Callable[[], object], num_runs: int) -> float:
    """Seconds of the best run, which others on the machine have disturbed the least."""
    spent = []
    for _ in range(num_runs):
        start = time.perf_counter()
        work()
        spent.append(time.perf_counter() - start)
    return min(spent)


def latencies_us(match: Callable[[int], object], num_prompts: int) -> dict[str, float]:
    """p50 and p99 of `match(number of a prompt)`, after a tenth of the prompts as warming up."""
    for number in range(num_prompts // 10):
        match(number)
    spent = []
    for number in range(num_prompts):
        start = time.perf_counter_ns()
        match(number)
        spent.append(time.perf_counter_ns() - start)
    spent.sort()
    return {"p50_us": spent[len(spent) // 2] / 1e3, "p99_us": spent[len(spent) * 99 // 100] / 1e3}


def resident_bytes() -> int:
    """Of this process, now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _fresh(seed: int) -> Iterator[bytes]:
    number = 0
    while True:
        wide = blake2b(b"%d/%d" % (seed, number), digest_size=64).digest()
        yield from (wide[place : place + 16] for place in (0, 16, 32, 48))
        number += 1
