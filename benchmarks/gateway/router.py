"""Measures what a gateway costs: CPU seconds for each request and token, and the latency it adds.

    python -m benchmarks.gateway.router --json router.json --plot router.svg

A stub worker speaks the real protocol and computes nothing; the gateway is `baton gateway` with the demo model's
tokenizer and template: it validates, tokenises, hashes, matches, decides, detokenises and writes SSE. CPU time is what
the operating system counts for its process, so that a busy machine disturbs it little; latency and tokens a second need
an idle one.

    a request   chat of about 30 tokens, answered with 1         CPU of the gateway / requests
    a token     answers of 256 tokens, 20 ms apart               (CPU - requests' share) / tokens
    added       first token, one request at a time: the client's clock, the stub included (about 0.3 ms)
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.gateway.stub_worker import TOKENS
from benchmarks.output import drawing, write_figures
from cluster.bench.http import Connection, Connections, HttpEndpoint
from cluster.cli.serve import DEMO
from kvtransfer.native import cache_folder, compile_c

BATON = "from cluster.cli.main import main; main()"
QUESTION = "Say in a few words what the function os.path.join does, and what it gives for an absolute second part."
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


MAX_SILENCE_MS = 30_000
_READ = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """`cores`: CPU seconds of the gateway a second. `tokens_per_event` is above 1 where it was late, or its loop busy,
    and joined tokens."""

    at_once: int
    cpu_s_per_million_tokens: float
    tokens_per_s: float
    cores: float
    tokens_per_event: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayFigures:
    cpu_s_per_1000_requests: float
    streams: tuple[Streams, ...]
    added_ms_p50: float
    added_ms_p99: float
    whole_ms_p50: float


def cpu_s(pid: int) -> float:
    """User and system time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


@contextmanager
def worker_process(module: str, *flags: str) -> Iterator[str]:
    """The address of a worker process that computes nothing; the process prints it first."""
    with subprocess.Popen([sys.executable, "-m", module, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@contextmanager
def gateway(worker: str, *flags: str, program: str = BATON) -> Iterator[tuple[str, int]]:
    """Its URL and process id. `program` runs the command line of `baton`."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", program, "gateway", "--model", DEMO["model"], "--served-name", "demo"]
    command += ["--worker", worker, "--port", str(port), "--grpc-port", "0", *flags]
    with subprocess.Popen(command, text=True) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 60
            while not _ready(url):
                assert process.poll() is None, "died"
                assert time.monotonic() < deadline, "the gateway does not become ready"
                time.sleep(0.1)
            yield url, process.pid
        finally:
            process.terminate()
            process.communicate()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def read_streams(connections: Sequence[socket.socket]) -> int:
    """The number of events of these answers until all have ended. Compiled code counts them without parsing, so that
    the client is not the limit at a hundred thousand events a second. Other threads run meanwhile."""
    library = ctypes.CDLL(str(compile_c(Path(__file__).with_name("streams.c"), cache_folder())))
    library.streams_read.argtypes, library.streams_read.restype = _READ, ctypes.c_int64
    fds = (ctypes.c_int * len(connections))(*(one.fileno() for one in connections))
    num_events = int(library.streams_read(fds, len(fds), MAX_SILENCE_MS))
    assert num_events >= 0, {-1: "an answer was cut off", -2: "nothing comes any more"}.get(num_events, "no memory")
    return num_events


class StreamClient:
    def __init__(self, url: str, *, prompt_bytes: int = len(QUESTION)) -> None:
        self._question = (QUESTION * (prompt_bytes // len(QUESTION) + 1))[:prompt_bytes]
        self._endpoint = HttpEndpoint.parse(url)
        self._clock = time.perf_counter
        self._connections = Connections(self._endpoint, self._clock)
        self.num_events = 0

    async def ask(self, num_tokens: int, number: int, *, stream: bool = True) -> tuple[float, float]:
        """Seconds to the first event and to the end."""
        request = self._request(num_tokens, number, stream=stream)
        connection: Connection = await self._connections.take()
        first_s = 0.0
        start_s = self._clock()

        def saw(event: bytes, now: float) -> None:
            nonlocal first_s
            first_s = first_s or now
            self.num_events += 1

        reply = await connection.send(request, saw)
        end_s = self._clock()
        assert reply.status == 200, bytes(reply.body)
        self._connections.give_back(connection)
        return (first_s or end_s) - start_s, end_s - start_s

    def _request(self, num_tokens: int, number: int, *, stream: bool) -> bytes:
        asked: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": f"{self._question} ({number})"}],
            "max_tokens": num_tokens,
            "stream": stream,
            "ignore_eos": True,
        }
        body = json.dumps(asked).encode()
        return f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    def stream(self, num_tokens: int, at_once: int) -> None:
        """So many answers at the same time, of which only the events are counted."""
        with ExitStack() as stack:
            address = self._endpoint.host, self._endpoint.port
            connections = [stack.enter_context(socket.create_connection(address)) for _ in range(at_once)]
            for number, connection in enumerate(connections):
                connection.sendall(self._request(num_tokens, number, stream=True))
            self.num_events += read_streams(connections)

    async def ask_all(self, num_requests: int, num_tokens: int, *, at_once: int) -> None:
        numbers = iter(range(num_requests))

        async def one_after_another() -> None:
            for number in numbers:
                await self.ask(num_tokens, number)

        await asyncio.gather(*(one_after_another() for _ in range(at_once)))


def pin(pid: int) -> None:
    """The gateway, with its threads, to the first core; this process, and all else that it has begun, to the others."""
    first, *others = sorted(os.sched_getaffinity(0))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for process in (os.getpid(), *map(int, children)):
        for thread in os.listdir(f"/proc/{process}/task"):
            os.sched_setaffinity(int(thread), {first} if process == pid else set(others))


async def measure(
    url: str, pid: int, *, num_requests: int, prompt_bytes: int, at_once: Sequence[int], num_tokens: int
) -> GatewayFigures:
    client = StreamClient(url, prompt_bytes=prompt_bytes)
    await client.ask_all(200, 1, at_once=8)  # warm
    alone = [await client.ask(1, number) for number in range(300)]
    before_s = cpu_s(pid)
    await client.ask_all(num_requests, 1, at_once=16)
    per_request_s = (cpu_s(pid) - before_s) / num_requests
    client.stream(len(TOKENS), 8)  # every word is met once, as by a gateway that has served for a minute
    streams = [measure_streams(client, pid, count, num_tokens, per_request_s) for count in at_once]
    first_ms = sorted(first_s * 1000 for first_s, _ in alone)
    return GatewayFigures(
        cpu_s_per_1000_requests=per_request_s * 1000,
        streams=tuple(streams),
        added_ms_p50=statistics.median(first_ms),
        added_ms_p99=first_ms[int(0.99 * len(first_ms))],
        whole_ms_p50=statistics.median(whole_s * 1000 for _, whole_s in alone),
    )


def measure_streams(client: StreamClient, pid: int, at_once: int, tokens_each: int, per_request_s: float) -> Streams:
    before_s, before, start_s = cpu_s(pid), client.num_events, time.perf_counter()
    client.stream(tokens_each, at_once)
    spent_s, wall_s, num_tokens = cpu_s(pid) - before_s, time.perf_counter() - start_s, at_once * tokens_each
    num_events = client.num_events - before - 3 * at_once  # a role, a finish, and the word that it is done
    return Streams(
        at_once=at_once,
        cpu_s_per_million_tokens=(spent_s - at_once * per_request_s) / num_tokens * 1e6,
        tokens_per_s=num_tokens / wall_s,
        cores=spent_s / wall_s,
        tokens_per_event=num_tokens / num_events,
    )


def show(figures: GatewayFigures) -> None:
    print(f"CPU s per 1,000 requests   {figures.cpu_s_per_1000_requests:8.2f}")
    print(f"first token, ms p50 / p99  {figures.added_ms_p50:8.2f} / {figures.added_ms_p99:.2f}")
    print(f"{'streams':>10} {'CPU s per million tokens':>26} {'tokens/s':>10} {'cores':>6} {'tokens an event':>16}")
    for one in figures.streams:
        told = f"{one.at_once:10} {one.cpu_s_per_million_tokens:26.1f} {one.tokens_per_s:10,.0f}"
        print(f"{told} {one.cores:6.2f} {one.tokens_per_event:16.2f}")


def draw(figures: GatewayFigures, path: Path) -> None:
    with drawing(path, size=(6.4, 4)) as [[axes]]:
        counts = [one.at_once for one in figures.streams]
        axes.plot(counts, [one.cpu_s_per_million_tokens for one in figures.streams], marker="o")
        axes.set(xscale="log", xlabel="streams at once", ylabel="CPU seconds per million tokens", ylim=(0, None))
        axes.set_title("One gateway process, everything it does", fontsize=10)
        axes.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--prompt-bytes", type=int, default=len(QUESTION), help="Of a request's question.")
    parser.add_argument("--num-streams", default="16,64,256", help="At once.")
    parser.add_argument("--num-tokens", type=int, default=256, help="Of a stream.")
    parser.add_argument("--step-ms", type=float, default=20.0, help="Between the tokens of a stream.")
    parser.add_argument("--pin", action="store_true", help="The gateway alone on core 0, all else on the others.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="Needs matplotlib.")
    args = parser.parse_args()
    at_once = [int(count) for count in args.num_streams.split(",")]
    stub = worker_process("benchmarks.gateway.stub_worker", "--step-ms", str(args.step_ms))
    with stub as worker, gateway(worker) as (url, pid):
        if args.pin:
            pin(pid)
        figures = uvloop.run(
            measure(
                url,
                pid,
                num_requests=args.num_requests,
                prompt_bytes=args.prompt_bytes,
                at_once=at_once,
                num_tokens=args.num_tokens,
            )
        )
    show(figures)
    write_figures(args.json, figures=asdict(figures))
    if args.plot is not None:
        draw(figures, args.plot)


if __name__ == "__main__":
    main()
