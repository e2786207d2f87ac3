"""Measures how evenly connections spread over processes behind one port: the largest share over the mean.

shared       every process accepts from the same listening socket
reuseport    every process has a listening socket of its own (SO_REUSEPORT), the kernel chooses by a hash
handed on    one process accepts and hands the sockets on, in turn

python -m benchmarks.gateway.accepting
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections import Counter
from itertools import cycle
from statistics import median
from typing import cast

import typer
import uvloop

from benchmarks.output import JsonFile, PlotFile, write_bars

PROCESSES, ROUNDS, BACKLOG = 4, 8, 2048
WAYS = ("shared", "reuseport", "handed on")
CASES = ((8, 0.01), (32, 0.0), (32, 0.003), (256, 0.0), (256, 0.001))  # connections, and seconds between them


class Named(asyncio.Protocol):
    """Says which process it is."""

    def __init__(self, number: int) -> None:
        self._number = number

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(bytes([self._number]))


async def serve(way: str, number: int, given: socket.socket, ready: socket.socket) -> None:
    """`given`: what it accepts from, or what sockets are handed on by."""
    loop, adopted = asyncio.get_running_loop(), set[asyncio.Future[object]]()

    def take() -> None:
        _, descriptors, _, _ = socket.recv_fds(given, 1, 1)
        for one in descriptors:
            connection = socket.socket(fileno=one)
            connection.setblocking(False)
            adopted.add(asyncio.ensure_future(loop.connect_accepted_socket(lambda: Named(number), connection)))

    if way == "handed on":
        loop.add_reader(given, take)
    else:
        await loop.create_server(lambda: Named(number), sock=given, backlog=BACKLOG)
    ready.send(b".")
    await asyncio.Event().wait()


async def hand_on(listening: socket.socket, ends: list[socket.socket], ready: socket.socket) -> None:
    turns = cycle(ends)

    def accept() -> None:
        connection, _ = listening.accept()
        with connection:
            socket.send_fds(next(turns), [b"."], [connection.fileno()])

    asyncio.get_running_loop().add_reader(listening, accept)
    ready.send(b".")
    await asyncio.Event().wait()


async def shares(port: int, count: int, gap_s: float) -> Counter[int]:
    """The number of connections that each process answered."""

    async def connect(place: int) -> tuple[int, asyncio.StreamWriter]:
        await asyncio.sleep(gap_s * place)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        return (await reader.readexactly(1))[0], writer

    answers = await asyncio.gather(*(connect(place) for place in range(count)))
    for _, writer in answers:
        writer.close()
    return Counter(number for number, _ in answers)


def bound(port: int = 0) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    made.listen(BACKLOG)
    return made


def measure(way: str) -> dict[str, float]:
    """Of each case, the median of the largest share over the mean."""
    middle = {}
    context = multiprocessing.get_context("fork")
    ours, theirs = socket.socketpair()
    listening = bound()
    port = listening.getsockname()[1]
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(PROCESSES)]
    each = {"shared": [listening] * PROCESSES, "handed on": [end for _, end in pairs]}
    given = each.get(way) or [listening, *(bound(port) for _ in range(PROCESSES - 1))]
    work = [serve(way, number, one, theirs) for number, one in enumerate(given)]
    if way == "handed on":
        work.append(hand_on(listening, [end for end, _ in pairs], theirs))
    processes = [context.Process(target=uvloop.run, args=(one,), daemon=True) for one in work]
    for process in processes:
        process.start()
    for one in given:  # a closed process must not be given connections
        one.close()
    for _ in processes:
        ours.recv(1)
    for count, gap_s in CASES:
        found = [asyncio.run(shares(port, count, gap_s)) for _ in range(ROUNDS)]
        uneven = [max(counts.values()) * PROCESSES / count for counts in found]
        case = f"{count:3} connections, {1000 * gap_s:2g} ms between them"
        print(f"{way:10} {case}: {median(uneven):.2f}, at worst {max(uneven):.2f}", flush=True)
        middle[case] = median(uneven)
    for process in processes:
        process.kill()
        process.join()
    for coroutine in work:
        coroutine.close()
    return middle


def main(json_file: JsonFile = None, plot: PlotFile = None) -> None:
    found = {way: measure(way) for way in WAYS}
    figures = {case: {way: found[way][case] for way in WAYS} for case in found[WAYS[0]]}
    write_bars(figures, unit="largest share / mean", json_file=json_file, plot=plot)


if __name__ == "__main__":
    typer.run(main)
