"""Is the simulator right? The same requests on a live cluster of this machine, and in a simulation calibrated on it.

python -m benchmarks.simulator_validation                     about three minutes, on a machine with nothing else to do
python -m benchmarks.simulator_validation --json f.json       and figures

    live: baton worker, baton gateway
        ├── baton bench --concurrency 1, 3, 8 ──▶ calibration ──▶ baton simulate --trace
        └── baton bench --trace, open loop ─────▶ TTFT, TPOT          against its own

Loads that are measured are none of those that it is calibrated on: lengths, rates and concurrency differ. Decisions are
compared on two workers, with requests one after the other and a policy to which time is nothing.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from cluster.bench.hardware import find_hardware
from cluster.bench.verb import write_json
from cluster.simulate.latency import Calibrated, calibrate, read_points

FORMAT = "baton-simulator-validation/1"
BATON = str(Path(sys.executable).with_name("baton"))
MODEL = Path(__file__).parent.parent / "demo" / "model"
SETTINGS = (
    "worker.block_size=16", "worker.max_num_batched_tokens=2048", "worker.max_num_seqs=64", "worker.prefill_chunk=512",
    "worker.num_blocks=8000", "worker.max_model_len=2048", "worker.steps_in_flight=0",
)  # fmt: skip
AIM = 0.15
PORT = 18420
DECIDING = "longest_prefix"
NUM_DECISIONS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A closed loop of so many requests at once."""

    at_once: int
    num_requests: int
    input_len: int
    output_len: int


CALIBRATIONS = (
    Calibration(at_once=1, num_requests=24, input_len=24, output_len=40),
    Calibration(at_once=1, num_requests=16, input_len=300, output_len=40),
    Calibration(at_once=1, num_requests=12, input_len=1000, output_len=40),
    Calibration(at_once=3, num_requests=30, input_len=150, output_len=60),
    Calibration(at_once=8, num_requests=64, input_len=200, output_len=60),
    Calibration(at_once=8, num_requests=48, input_len=40, output_len=100),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of an open loop with Poisson arrivals; one in three begins as another one does."""

    name: str
    num_requests: int
    rate: float
    prompts: tuple[int, int]
    answers: tuple[int, int]


LOADS = (
    Load(name="short prompts, 5 a second", num_requests=120, rate=5.0, prompts=(20, 200), answers=(10, 50)),
    Load(name="long prompts, 4 a second", num_requests=80, rate=4.0, prompts=(300, 900), answers=(20, 80)),
    Load(name="mixed, 10 a second", num_requests=200, rate=10.0, prompts=(30, 500), answers=(20, 80)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Means, in seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    load: Load
    live: Outcome
    simulated: Outcome

    @property
    def errors(self) -> tuple[float, float]:
        return self.simulated.ttft_s / self.live.ttft_s - 1, self.simulated.tpot_s / self.live.tpot_s - 1


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures to this file.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Live runs of each load; the one of the middle TTFT counts.")] = 1,
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with serving(1, policy="prefix_aware") as url:
            latency, files = calibrated(url, folder)
            live = [middle([measured(url, load, folder) for _ in range(repeat)]) for load in LOADS]
        compared = [
            Compared(load=load, live=outcome, simulated=simulated(load, files, folder))
            for load, outcome in zip(LOADS, live, strict=True)
        ]
        same, num = decisions(files, folder)
    show(latency, compared, same, num)
    if json_file is not None:
        write_json(json_file, {
            "format": FORMAT,
            "command": "python -m benchmarks.simulator_validation",
            "hardware": asdict(find_hardware()),
            "settings": SETTINGS,
            "calibrations": [asdict(one) for one in CALIBRATIONS],
            "latency": asdict(latency),
            "loads": [asdict(one) | {"errors": one.errors} for one in compared],
            "decisions": {"policy": DECIDING, "same": same, "of": num},
        })  # fmt: skip
    if same < num or any(abs(error) > AIM for one in compared for error in one.errors):
        raise typer.Exit(1)


# -- a live cluster ----------------------------------------------------------------------------------------------------


@contextmanager
def serving(num_workers: int, *, policy: str) -> Iterator[str]:
    """The URL of a gateway and colocated workers on CPU, each a process; nothing else runs beside them."""
    url, ports = f"http://127.0.0.1:{PORT}", range(PORT + 1, PORT + 1 + num_workers)
    settings = [part for one in SETTINGS for part in ("--set", one)]
    model = ("--model", str(MODEL))
    commands = [
        [BATON, "worker", "--role", "colocated", "--device", "cpu", "--port", str(port), "--id", f"colocated-{place}",
         *model, *settings]
        for place, port in enumerate(ports)
    ]  # fmt: skip
    commands.append([
        BATON, "gateway", *model, "--policy", policy, "--port", str(PORT), "--grpc-port", "0",
        *(part for port in ports for part in ("--worker", f"127.0.0.1:{port}")),
    ])  # fmt: skip
    with tempfile.TemporaryFile("w+") as said:
        processes = [subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) for command in commands]
        try:
            until_s = time.monotonic() + 180
            while not _is_ready(url, num_workers):
                if any(process.poll() is not None for process in processes) or time.monotonic() > until_s:
                    said.seek(0)
                    raise SystemExit(f"the cluster did not come up: {said.read()[-2000:]}")
                time.sleep(0.5)
            yield url
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(60)


def _is_ready(url: str, num_workers: int) -> bool:
    try:
        workers = httpx.get(f"{url}/admin/status", timeout=5.0).json()["workers"]
    except (httpx.HTTPError, ValueError):
        return False
    return bool(sum(worker["state"] == "ready" for worker in workers) == num_workers)


def baton(*arguments: str) -> None:
    done = subprocess.run([BATON, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"baton {' '.join(arguments)} failed: {done.stdout[-1000:]} {done.stderr[-2000:]}")


def calibrated(url: str, folder: Path) -> tuple[Calibrated, Sequence[Path]]:
    """A first run is left out: it warms the cluster up."""
    files = []
    for number, one in enumerate((CALIBRATIONS[-1], *CALIBRATIONS)):
        file = folder / f"calibration-{number}.json"
        baton(
            "bench", "--url", url, "--concurrency", str(one.at_once), "--num-requests", str(one.num_requests),
            "--input-len", str(one.input_len), "--output-len", str(one.output_len), "--json", str(file),
        )  # fmt: skip
        files.append(file)
    return calibrate([point for file in files[1:] for point in read_points(file)]), files[1:]


def measured(url: str, load: Load, folder: Path) -> Outcome:
    file = folder / "live.json"
    baton("bench", "--url", url, "--trace", str(trace(load, folder)), "--json", str(file))
    return _means(json.loads(file.read_text())["figures"])


def middle(outcomes: Sequence[Outcome]) -> Outcome:
    return sorted(outcomes, key=lambda one: one.ttft_s)[len(outcomes) // 2]


# -- the same, simulated -----------------------------------------------------------------------------------------------


def simulated(load: Load, files: Sequence[Path], folder: Path) -> Outcome:
    file = folder / "simulated.json"
    _simulate(trace(load, folder), files, "--decode", "1", "--policy", "prefix_aware", "--json", str(file))
    return _means(json.loads(file.read_text())["runs"][0]["figures"]["report"])


def _simulate(trace_file: Path, files: Sequence[Path], *more: str) -> None:
    baton(
        "simulate", "--trace", str(trace_file), "--prefill", "0", *more,
        *(part for file in files for part in ("--calibration", str(file))),
        *(part for one in SETTINGS for part in ("--set", one)),
    )  # fmt: skip


def _means(figures: dict[str, Any]) -> Outcome:
    return Outcome(ttft_s=figures["ttft_s"]["mean"], tpot_s=figures["tpot_s"]["mean"])


# -- decisions ---------------------------------------------------------------------------------------------------------


def decisions(files: Sequence[Path], folder: Path) -> tuple[int, int]:
    """How many of so many requests, asked one after the other, went to the same worker live and simulated.

    Workers that are alike take turns, and a request before these, such as a bench's probe, moves the turn on: names are
    matched as they fit best.
    """
    load = Load(name="apart", num_requests=NUM_DECISIONS, rate=1 / 30, prompts=(60, 400), answers=(2, 6))
    asked = trace(load, folder)
    with serving(2, policy=DECIDING) as url:
        baton("bench", "--url", url, "--trace", str(asked), "--concurrency", "1")
        recent = httpx.get(f"{url}/admin/requests", params={"limit": str(NUM_DECISIONS)}, timeout=10.0)
    live = [one["decode"] for one in reversed(recent.json()["requests"])]
    log = folder / "events.log"
    _simulate(asked, files, "--decode", "2", "--policy", DECIDING, "--events", str(log))
    ended = (line for line in log.read_text().splitlines() if line.split()[1] == "ended")
    there = [line.rpartition(">")[2] for line in ended]
    renamings = (dict(zip(sorted(set(there)), names, strict=True)) for names in permutations(sorted(set(live))))
    return max(sum(a == names[b] for a, b in zip(live, there, strict=True)) for names in renamings), NUM_DECISIONS


def trace(load: Load, folder: Path) -> Path:
    """In Mooncake's format: the same for the same load."""
    chance, at_s, lines = random.Random(load.name), 0.0, []
    for number in range(load.num_requests):
        at_s += chance.expovariate(load.rate)
        line = {
            "timestamp": round(at_s * 1000),
            "input_length": chance.randint(*load.prompts),
            "output_length": chance.randint(*load.answers),
        }
        beginning = chance.randrange(6) if chance.random() < 1 / 3 else 100 + number
        blocks = -(-line["input_length"] // 512)
        lines.append(line | {"hash_ids": [beginning * 10 + place for place in range(blocks)]})
    file = folder / f"{load.name.replace(' ', '-')}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def show(latency: Calibrated, compared: Sequence[Compared], same: int, num: int) -> None:
    console = Console(width=120)
    console.print(
        f"calibrated on {latency.num_points} points, off by {latency.error:.1%} on average, {latency.worst:.1%} at "
        f"most; a request takes {latency.request_s * 1000:.1f} ms beside its steps"
    )
    table = Table("means in ms", "TTFT live", "simulated", "error", "TPOT live", "simulated", "error")
    for one in compared:
        ttft, tpot = one.errors
        table.add_row(
            one.load.name, f"{one.live.ttft_s * 1000:.1f}", f"{one.simulated.ttft_s * 1000:.1f}", f"{ttft:+.1%}",
            f"{one.live.tpot_s * 1000:.2f}", f"{one.simulated.tpot_s * 1000:.2f}", f"{tpot:+.1%}",
        )  # fmt: skip
    console.print(table)
    console.print(f"the same worker was chosen for {same} of {num} requests ({DECIDING})")


if __name__ == "__main__":
    typer.run(main)
