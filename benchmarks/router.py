"""What a gateway costs: CPU seconds a request and a token, and the latency it adds, with all its work done.

    python -m benchmarks.router --json router.json

A stub worker speaks the real protocol and computes nothing; the gateway is `baton gateway` with the demo model's
tokenizer and template: it validates, tokenises, hashes, matches, decides, detokenises and writes SSE. CPU time is what
the operating system counts for its process, so that a busy machine disturbs it little; latency and tokens a second want
an idle one.

    a request   chat of about 30 tokens, answered with 1         CPU of the gateway / requests
    a token     answers of 512 tokens, 256 at once, 20 ms apart  (CPU - requests' share) / tokens
    added       first token, one request at a time: the client's clock, the stub's own way included (about 0.3 ms)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.bench.hardware import find_hardware, find_versions
from cluster.bench.http import Connection, Connections, Endpoint
from cluster.serve import DEMO

BATON = "from cluster.cli import main; main()"
QUESTION = "Say in a few words what the function os.path.join does, and what it gives for an absolute second part."
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    cpu_s_per_1000_requests: float
    cpu_s_per_million_tokens: float
    tokens_per_s: float
    added_ms_p50: float
    added_ms_p99: float
    whole_ms_p50: float


def cpu_s(pid: int) -> float:
    """User and system time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


@contextmanager
def stub_worker(step_ms: float) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.stub_worker", "--step-ms", str(step_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@contextmanager
def gateway(worker: str, *flags: str) -> Iterator[tuple[str, int]]:
    """Its URL and process id."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", BATON, "gateway", "--model", DEMO["model"], "--served-name", "demo"]
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


class Client:
    def __init__(self, url: str) -> None:
        self._endpoint = Endpoint.parse(url)
        self._clock = time.perf_counter
        self._connections = Connections(self._endpoint, self._clock)
        self.num_tokens = 0

    async def ask(self, num_tokens: int, number: int, *, stream: bool = True) -> tuple[float, float]:
        """Seconds to the first event and to the end."""
        asked: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": f"{QUESTION} ({number})"}],
            "max_tokens": num_tokens,
            "stream": stream,
            "ignore_eos": True,
        }
        body = json.dumps(asked).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        connection: Connection = await self._connections.take()
        first_s = 0.0
        start_s = self._clock()

        def saw(event: bytes, now: float) -> None:
            nonlocal first_s
            first_s = first_s or now
            self.num_tokens += 1

        reply = await connection.send(head + body, saw)
        end_s = self._clock()
        assert reply.status == 200, bytes(reply.body)
        self._connections.give_back(connection)
        return (first_s or end_s) - start_s, end_s - start_s

    async def ask_all(self, num_requests: int, num_tokens: int, *, at_once: int) -> None:
        numbers = iter(range(num_requests))

        async def one_after_another() -> None:
            for number in numbers:
                await self.ask(num_tokens, number)

        await asyncio.gather(*(one_after_another() for _ in range(at_once)))


async def measure(url: str, pid: int, *, num_requests: int, num_streams: int) -> Figures:
    client = Client(url)
    await client.ask_all(200, 1, at_once=8)  # warm
    alone = [await client.ask(1, number) for number in range(300)]
    before_s = cpu_s(pid)
    await client.ask_all(num_requests, 1, at_once=16)
    per_request_s = (cpu_s(pid) - before_s) / num_requests
    before_s, start_s = cpu_s(pid), time.perf_counter()
    await client.ask_all(num_streams, 512, at_once=num_streams)
    wall_s = time.perf_counter() - start_s
    num_tokens = num_streams * 512
    per_token_s = (cpu_s(pid) - before_s - num_streams * per_request_s) / num_tokens
    first_ms = sorted(first_s * 1000 for first_s, _ in alone)
    return Figures(
        cpu_s_per_1000_requests=per_request_s * 1000,
        cpu_s_per_million_tokens=per_token_s * 1e6,
        tokens_per_s=num_tokens / wall_s,
        added_ms_p50=statistics.median(first_ms),
        added_ms_p99=first_ms[int(0.99 * len(first_ms))],
        whole_ms_p50=statistics.median(whole_s * 1000 for _, whole_s in alone),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--num-streams", type=int, default=256, help="At once, of 512 tokens each")
    parser.add_argument("--step-ms", type=float, default=20.0, help="Between the tokens of a stream.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with stub_worker(args.step_ms) as worker, gateway(worker) as (url, pid):
        figures = asyncio.run(measure(url, pid, num_requests=args.num_requests, num_streams=args.num_streams))
    for name, value in asdict(figures).items():
        print(f"{re.sub('_', ' ', name):32} {value:10,.2f}")
    if args.json is not None:
        told = {"hardware": asdict(find_hardware()), "versions": dict(find_versions()), "figures": asdict(figures)}
        args.json.write_text(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
