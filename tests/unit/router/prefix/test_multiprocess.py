"""Gateway processes on one machine tell each other which prompts they have just routed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from protos.chain import Chain
from router.prefix.memory import MemoryPrefixIndex
from router.prefix.multiprocess import MAX_BLOCKS, MultiprocessPrefixIndex
from router.replicas.datagram_bus import MAX_WAITING

PROMPT = Chain(bytes(range(1, 65)))
FOREVER_S = 3600.0


def made(folder: Path, number: int) -> MultiprocessPrefixIndex:
    return MultiprocessPrefixIndex(MemoryPrefixIndex(), folder=folder, number=number, count=3)


def expected(index: MultiprocessPrefixIndex, hashes: Chain = PROMPT, after_s: float = 0.0) -> int:
    return index.match(hashes, now=asyncio.get_running_loop().time() + after_s).blocks.get("w", 0)


def route(index: MultiprocessPrefixIndex, hashes: Chain = PROMPT) -> None:
    index.expect("w", hashes, until=asyncio.get_running_loop().time() + FOREVER_S)


async def until(index: MultiprocessPrefixIndex, num_heard: int) -> None:
    while index.num_heard < num_heard:  # noqa: ASYNC110 - it comes over a socket
        await asyncio.sleep(0)


async def test_siblings_expect_what_one_of_them_has_routed(tmp_path: Path) -> None:
    first, second = made(tmp_path, 0), made(tmp_path, 1)  # and a third, that never came
    for index in (first, second):
        await index.start()
    route(first)
    await until(second, 1)
    assert (expected(second), expected(second, after_s=2 * FOREVER_S)) == (4, 0)
    longest = Chain(bytes(16 * (MAX_BLOCKS + 1)))
    route(second, longest)
    await until(first, 1)
    assert first.num_heard == 1, "as much of it as one message holds"
    await first.close()
    route(second)
    again = made(tmp_path, 0)
    await again.start()
    route(second)
    await until(again, 1)
    assert expected(again) == 4
    for index in (second, again):
        await index.close()


async def test_a_sibling_that_does_not_listen_holds_nobody_up(tmp_path: Path) -> None:
    first, second = made(tmp_path, 0), made(tmp_path, 1)
    for index in (first, second):
        await index.start()
    for _ in range(2 * MAX_WAITING):
        route(first)
    assert 2 * MAX_WAITING < first.num_dropped < 3 * MAX_WAITING, (
        "all to the one that is not there, and what is too old"
    )
    await until(second, MAX_WAITING)  # what waited comes when it listens again
    for index in (first, second):
        await index.close()
