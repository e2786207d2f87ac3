"""The share of a gateway's CPU time that its ledger or its traces take.

    python -m benchmarks.gateway.part_cpu ledger
    python -m benchmarks.gateway.part_cpu traces --collector living|slow|silent|dead

The gateway is `baton gateway` over a stub worker that computes nothing (`benchmarks.gateway.router`), with a ledger and
prices, or with every request traced. It counts its own CPU time by the clocks of its threads: that of the part's calls
on the event loop, all of the part's thread, and that of the process. The difference between two gateways, one without
the part, says less: two equal ones differ by 10 % on a busy machine.

Collectors of traces: `living` takes them, `silent` accepts connections and never answers, `slow` answers after a second
with 503, and at `dead` nothing listens.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from opentelemetry.sdk._shared_internal import BatchProcessor

from benchmarks.gateway.router import StreamClient, gateway, worker_process
from benchmarks.output import write_figures
from cluster.cli.main import main as baton
from router.observe.exporter import TraceExporter
from router.observe.ledger.ledger_store import LedgerStore
from router.observe.ledger.request_ledger import RequestLedger

PROGRAM = "from benchmarks.gateway.part_cpu import gateway_main; gateway_main()"
FILE, PART = "BATON_PART_CPU", "BATON_PART"
WRITE_S = 0.25
SETTLE_S = 6.0
"""The last rows are written, the last traces sent."""
PRICES = 'device_hour = 2.5\n[[price]]\nsince = 2026-01-01\nmodel = "*"\ninput = 0.5\ncached = 0.05\noutput = 1.5\n'
COLLECTORS = ("living", "slow", "silent", "dead")


class GatewayPart(NamedTuple):
    """`calls`: methods of `caller` on the event loop. `runner.run` is the part's thread."""

    caller: type
    calls: Sequence[str]
    runner: type
    run: str


PARTS: Mapping[str, GatewayPart] = {
    "ledger": GatewayPart(RequestLedger, ("began", "ended", "look", "note_open"), LedgerStore, "_run"),
    "traces": GatewayPart(TraceExporter, ("ended",), BatchProcessor, "worker"),
}


class PartClock:
    """CPU time of a part in this process."""

    def __init__(self, part: GatewayPart) -> None:
        self._part = part
        self._calls_s = dict.fromkeys(part.calls, 0.0)
        self._thread: threading.Thread | None = None

    def install(self) -> None:
        for name in self._part.calls:
            setattr(self._part.caller, name, self._timed(name, getattr(self._part.caller, name)))
        runner: Any = self._part.runner
        run = getattr(runner, self._part.run)

        def timed_run(owner: Any) -> None:
            self._thread = threading.current_thread()
            run(owner)

        setattr(runner, self._part.run, timed_run)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begun_s = time.thread_time()
            try:
                return call(*args)
            finally:
                self._calls_s[name] += time.thread_time() - begun_s

        return timed

    def read(self) -> dict[str, float]:
        thread_s = 0.0
        if self._thread is not None and self._thread.ident is not None and self._thread.is_alive():
            thread_s = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
        return {**self._calls_s, "thread": thread_s, "gateway": time.process_time()}


def gateway_main() -> None:
    clock, file = PartClock(PARTS[os.environ[PART]]), Path(os.environ[FILE])
    clock.install()

    def write() -> None:
        while True:
            part = file.with_suffix(".part")
            part.write_text(json.dumps(clock.read()))
            part.replace(file)
            time.sleep(WRITE_S)

    threading.Thread(target=write, daemon=True).start()
    baton()


def fresh(file: Path) -> dict[str, float]:
    """A reading made after this call."""
    file.unlink()
    while not file.exists():
        time.sleep(0.01)
    reading: dict[str, float] = json.loads(file.read_text())
    return reading


def measured(url: str, file: Path, *, turns: int, at_once: int, num_tokens: int) -> dict[str, float]:
    """CPU microseconds of a request."""
    client = StreamClient(url)
    client.stream(num_tokens, at_once)  # warm
    time.sleep(SETTLE_S)
    before, count = fresh(file), turns * at_once
    for _ in range(turns):
        client.stream(num_tokens, at_once)
    time.sleep(SETTLE_S)
    after = fresh(file)
    return {name: 1e6 * (after[name] - before[name]) / count for name in after}


class _Taken(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    delay_s = 0.0
    status = 200

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        time.sleep(self.delay_s)
        self.send_response(self.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


def collector_main(kind: str) -> None:
    _Taken.delay_s, _Taken.status = (1.0, 503) if kind == "slow" else (0.0, 200)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Taken)
    print(server.server_port, flush=True)
    server.serve_forever()


@contextmanager
def collector(kind: str) -> Iterator[str]:
    """Its URL."""
    if kind in ("dead", "silent"):
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            port = listener.getsockname()[1]
            if kind == "dead":
                listener.close()
            yield f"http://127.0.0.1:{port}"
        return
    program = f"from benchmarks.gateway.part_cpu import collector_main; collector_main({kind!r})"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=32, help="Answers of a turn.")
    parser.add_argument("--num-tokens", default="1,64,256", help="Of an answer, one measurement each.")
    parser.add_argument("--step-ms", type=float, default=20.0, help="Between the tokens of an answer.")
    parser.add_argument("--collector", choices=COLLECTORS, default="living")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder, collector(args.collector) as endpoint:
        prices, file = Path(folder) / "prices.toml", Path(folder) / "cpu.json"
        prices.write_text(PRICES)
        os.environ.update({FILE: str(file), PART: args.part})
        settings = {
            "ledger": [f"router.ledger.path={folder}/ledger.db", f"router.ledger.prices={prices}"],
            "traces": ["router.ledger.path=", f"router.telemetry.endpoint={endpoint}", "router.telemetry.sample=1"],
        }[args.part]
        flags = [flag for setting in settings for flag in ("--set", setting)]
        stub = worker_process("benchmarks.gateway.stub_worker", "--step-ms", str(args.step_ms))
        with stub as worker, gateway(worker, *flags, program=PROGRAM) as (url, _):
            for num_tokens in map(int, args.num_tokens.split(",")):
                one = measured(url, file, turns=args.turns, at_once=args.at_once, num_tokens=num_tokens)
                whole = one.pop("gateway")
                found.append({"num_tokens": num_tokens, "gateway_us": whole, "part_us": one})
                parts = ", ".join(f"{name} {us:.0f}" for name, us in one.items())
                share = sum(one.values()) / whole
                print(f"answers of {num_tokens:4} tokens: {whole:6.0f} us of CPU a request, {share:.1%} in {parts}")
    write_figures(args.json, part=args.part, collector=args.collector, figures=found)


if __name__ == "__main__":
    main()
