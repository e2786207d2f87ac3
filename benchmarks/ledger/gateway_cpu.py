"""The ledger's share of a gateway's CPU time.

    python -m benchmarks.ledger.gateway_cpu

The gateway is `baton gateway` with a ledger and prices, over a stub worker that computes nothing
(`benchmarks.gateway.router`). It counts its own CPU time by the clocks of its threads: that of the ledger's calls on
the event loop, all of the ledger's thread, and that of the process. The difference between two gateways, one without a
ledger, says less: two equal ones differ by 10 % on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gateway.router import StreamClient, gateway, worker_process
from benchmarks.output import write_figures
from cluster.cli.main import main as baton
from router.ledger.ledger import RequestLedger
from router.ledger.store import LedgerStore

PROGRAM = "from benchmarks.ledger.gateway_cpu import gateway_main; gateway_main()"
FILE = "BATON_LEDGER_CPU"
CALLS = ("begun", "ended", "look", "note_open")
WRITE_S = 0.25
PRICES = 'device_hour = 2.5\n[[price]]\nsince = 2026-01-01\nmodel = "*"\ninput = 0.5\ncached = 0.05\noutput = 1.5\n'


class LedgerClock:
    """CPU time of the ledger in this process."""

    def __init__(self) -> None:
        self._calls_s = dict.fromkeys(CALLS, 0.0)
        self._thread: threading.Thread | None = None

    def install(self) -> None:
        for name in CALLS:
            setattr(RequestLedger, name, self._timed(name, getattr(RequestLedger, name)))
        run = LedgerStore._run

        def timed_run(store: LedgerStore) -> None:
            self._thread = threading.current_thread()
            run(store)

        setattr(LedgerStore, "_run", timed_run)  # noqa: B010 - mypy does not follow the assignment

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
    clock, file = LedgerClock(), Path(os.environ[FILE])
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
    before, count = fresh(file), turns * at_once
    for _ in range(turns):
        client.stream(num_tokens, at_once)
    time.sleep(1.0)  # the last rows are written
    after = fresh(file)
    return {name: 1e6 * (after[name] - before[name]) / count for name in after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=32, help="Answers of a turn.")
    parser.add_argument("--num-tokens", default="1,64,256", help="Of an answer, one measurement each.")
    parser.add_argument("--step-ms", type=float, default=20.0, help="Between the tokens of an answer.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        prices, file = Path(folder) / "prices.toml", Path(folder) / "cpu.json"
        prices.write_text(PRICES)
        os.environ[FILE] = str(file)
        settings = [f"router.ledger.path={folder}/ledger.db", f"router.ledger.prices={prices}"]
        flags = [flag for setting in settings for flag in ("--set", setting)]
        stub = worker_process("benchmarks.gateway.stub_worker", "--step-ms", str(args.step_ms))
        with stub as worker, gateway(worker, *flags, program=PROGRAM) as (url, _):
            for num_tokens in map(int, args.num_tokens.split(",")):
                one = measured(url, file, turns=args.turns, at_once=args.at_once, num_tokens=num_tokens)
                whole = one.pop("gateway")
                found.append({"num_tokens": num_tokens, "gateway_us": whole, "ledger_us": one})
                parts = ", ".join(f"{name} {us:.0f}" for name, us in one.items())
                share = sum(one.values()) / whole
                print(f"answers of {num_tokens:4} tokens: {whole:6.0f} us of CPU a request, {share:.1%} in {parts}")
    write_figures(args.json, figures=found)


if __name__ == "__main__":
    main()
