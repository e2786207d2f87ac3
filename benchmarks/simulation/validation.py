"""Compares the simulator with a live cluster of this machine, on the same requests, after calibration on it.

python -m benchmarks.simulation.validation                     about four minutes
python -m benchmarks.simulation.validation --json f.json       and figures

    live: baton worker, baton gateway
        ├── baton bench --profile, one at a time ────┬─▶ calibration ──▶ simulated trace
        ├── baton bench --profile, other requests ───┤
        └── baton bench --profile, a trace ───────────┴─▶ TTFT, TPOT          against its own

Each round profiles requests one after the other, and each load twice: with other requests, and with those that are
compared. Two calibrations are compared. One is on the steps of the compared run itself, and shows what the simulator
makes of batches, queues and waits. The other is on the other requests of all loads. Both are held to the aim. Decisions
are compared on two workers, with requests one after the other and a policy that ignores time.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.output import JsonFile, write_figures
from benchmarks.simulation.calibration import Calibrated, calibrate, read_points
from cluster.bench.bench_report import Objective
from cluster.config.cluster_config import PoolsConfig
from cluster.simulate.results.summary import summarise
from cluster.simulate.run.simulation import SimulationOutcome, simulate
from cluster.simulate.run.simulation_config import SimulationConfig, hardware_spec, read_settings, simulated_router
from cluster.simulate.world.simulated_load import UserSession, recorded

FORMAT = "baton-simulator-validation/1"
BATON = str(Path(sys.executable).with_name("baton"))
MODEL = Path(__file__).parents[2] / "demo" / "model"
NUM_BLOCKS = 8000
SETTINGS = (
    "worker.block_size=16", "worker.max_num_batched_tokens=2048", "worker.max_num_seqs=64", "worker.prefill_chunk=512",
    f"worker.num_blocks={NUM_BLOCKS}", "worker.max_model_len=2048", "worker.steps_in_flight=0",
)  # fmt: skip
AIM = 0.15
PORT = 18420
DECIDING = "prefix_aware"
NUM_DECISIONS = 40
OTHERS = "others"
ALONE = (
    "--concurrency", "1", "--set", "workload.requests=16", "--set", "workload.input_len=20:400",
    "--set", "workload.output_len=20",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoad:
    """Requests of an open loop with Poisson arrivals, in all rounds; one in three begins as another one does."""

    name: str
    num_requests: int
    rate: float
    prompts: tuple[int, int]
    answers: tuple[int, int]


LOADS = (
    OpenLoad(name="short prompts, 5 a second", num_requests=120, rate=5.0, prompts=(20, 200), answers=(10, 50)),
    OpenLoad(name="long prompts, 4 a second", num_requests=80, rate=4.0, prompts=(300, 900), answers=(20, 80)),
    OpenLoad(name="mixed, 10 a second", num_requests=200, rate=10.0, prompts=(30, 500), answers=(20, 80)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanTimes:
    """Means, in seconds."""

    ttft_s: float
    tpot_s: float

    def error_of(self, other: MeanTimes) -> tuple[float, float]:
        return other.ttft_s / self.ttft_s - 1, other.tpot_s / self.tpot_s - 1

    @classmethod
    def of(cls, file: Path) -> MeanTimes:
        """From the figures of `baton bench`."""
        figures = json.loads(file.read_text())["figures"]
        return cls(ttft_s=figures["ttft_s"]["mean"], tpot_s=figures["tpot_s"]["mean"])

    @classmethod
    def mean(cls, outcomes: Sequence[MeanTimes]) -> MeanTimes:
        """Of rounds of as many requests each."""
        return cls(ttft_s=fmean(one.ttft_s for one in outcomes), tpot_s=fmean(one.tpot_s for one in outcomes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """`simulated` is calibrated on the run itself, `foretold` on others."""

    load: OpenLoad
    live: MeanTimes
    simulated: MeanTimes
    foretold: MeanTimes

    @property
    def errors(self) -> tuple[float, float]:
        return self.live.error_of(self.simulated)

    @property
    def errors_foretold(self) -> tuple[float, float]:
        return self.live.error_of(self.foretold)


def farthest(compared: Sequence[Compared]) -> Mapping[str, float]:
    """The largest error of each calibration, whichever way it goes."""
    return {
        "calibrated on the run itself": max((error for one in compared for error in one.errors), key=abs),
        "calibrated on other requests": max((error for one in compared for error in one.errors_foretold), key=abs),
    }


def missed(compared: Sequence[Compared]) -> Sequence[str]:
    """The calibrations that miss the aim."""
    return [calibration for calibration, error in farthest(compared).items() if abs(error) > AIM]


def main(
    json_file: JsonFile = None,
    rounds: Annotated[int, typer.Option(min=1, help="The loads are cut into so many parts.")] = 2,
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with serving(1, policy="prefix_aware") as url:
            baton("bench", "--url", url, *ALONE)  # warms up
            profiles, live = measured(url, rounds, folder)
        latency = calibrated(profiles[OTHERS])
        compared = []
        for load in LOADS:
            own = simulated(load, rounds, calibrated(profiles[load.name]), folder)
            others = simulated(load, rounds, latency, folder)
            compared.append(Compared(load=load, live=MeanTimes.mean(live[load.name]), simulated=own, foretold=others))
        same, num = decisions(latency, folder)
    show(latency, compared, same, num)
    write_figures(
        json_file,
        format=FORMAT,
        load_average=os.getloadavg(),
        settings=SETTINGS,
        rounds=rounds,
        latency=asdict(latency),
        loads=[asdict(one) | {"errors": one.errors, "errors_foretold": one.errors_foretold} for one in compared],
        decisions={"policy": DECIDING, "same": same, "of": num},
    )
    if same < num or missed(compared):
        raise typer.Exit(1)


# -- a live cluster ----------------------------------------------------------------------------------------------------


@contextmanager
def serving(num_workers: int, *, policy: str) -> Iterator[str]:
    """The URL of a gateway and colocated workers on CPU. Each process computes on one thread: of two cores gateway and
    bench have the other."""
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
        processes = [
            subprocess.Popen(
                command,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "BATON_TOKEN": "of-the-validation"},
            )
            for command in commands
        ]
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


def measured(
    url: str, rounds: int, folder: Path
) -> tuple[Mapping[str, Sequence[Path]], Mapping[str, Sequence[MeanTimes]]]:
    """What to calibrate on, for each load and for those that are not to know it, and each load's outcomes, a round
    each."""
    profiles: dict[str, list[Path]] = {name: [] for name in (OTHERS, *(load.name for load in LOADS))}
    live: dict[str, list[MeanTimes]] = {load.name: [] for load in LOADS}
    figures = folder / "live.json"

    def profiled(of: Sequence[str], *arguments: str) -> None:
        file = folder / f"profile-{sum(map(len, profiles.values()))}.json"
        baton("bench", "--url", url, *arguments, "--json", str(figures), "--profile", str(file))
        for name in of:
            profiles[name].append(file)

    for number in range(rounds):
        profiled(tuple(profiles), *ALONE)
        for load in LOADS:
            others = trace(load, folder, part=f"others {number}", parts=rounds)
            profiled((OTHERS,), "--set", f"workload.trace={others}")
            asked = trace(load, folder, part=f"measured {number}", parts=rounds)
            profiled((load.name,), "--set", f"workload.trace={asked}")
            live[load.name].append(MeanTimes.of(figures))
    return profiles, live


# -- the same, simulated -----------------------------------------------------------------------------------------------


def calibrated(profiles: Sequence[Path]) -> Calibrated:
    return calibrate([point for file in profiles for point in read_points(file)])


def simulated(load: OpenLoad, rounds: int, latency: Calibrated, folder: Path) -> MeanTimes:
    outcomes = []
    for number in range(rounds):
        asked = trace(load, folder, part=f"measured {number}", parts=rounds)
        report = summarise(_simulate(asked, latency, 1, policy="prefix_aware", seed=number), Objective()).report
        assert report.ttft_s is not None
        assert report.tpot_s is not None
        outcomes.append(MeanTimes(ttft_s=report.ttft_s.mean, tpot_s=report.tpot_s.mean))
    return MeanTimes.mean(outcomes)


def _simulate(
    trace_file: Path, latency: Calibrated, num_workers: int, *, policy: str, seed: int = 0,
    write: Callable[[str], object] | None = None,
) -> SimulationOutcome:  # fmt: skip
    settings = read_settings(*(one for one in SETTINGS if "num_blocks" not in one))
    spec = hardware_spec(gpu="h100", model="llama-3-8b", tp=1, settings=settings)
    config = SimulationConfig(
        pools=PoolsConfig(colocated=num_workers), spec=replace(spec, latency=latency, num_blocks=NUM_BLOCKS),
        router=simulated_router(policy), seed=seed,
    )  # fmt: skip
    sessions = recorded(trace_file)
    outcome = simulate(config, through_gateway(sessions, latency.request_s), write=write)
    records = [replace(record, sent_s=session.due_s) for record, session in zip(outcome.records, sessions, strict=True)]
    return replace(outcome, records=records)


def through_gateway(sessions: Sequence[UserSession], request_s: float) -> list[UserSession]:
    """The sessions as they reach the router: the gateway needs `request_s` for each request, one after the other."""
    free_s, delayed = 0.0, []
    for session in sessions:
        free_s = max(free_s, session.due_s) + request_s
        delayed.append(replace(session, due_s=free_s))
    return delayed


# -- decisions ---------------------------------------------------------------------------------------------------------


def decisions(latency: Calibrated, folder: Path) -> tuple[int, int]:
    """The number of requests, sent one after the other, that went to the same worker live and simulated.

    Equal workers take turns, and an earlier request, such as a bench's probe, moves the turn on: names are matched as
    they fit best.
    """
    load = OpenLoad(name="apart", num_requests=NUM_DECISIONS, rate=1 / 30, prompts=(60, 400), answers=(2, 6))
    asked = trace(load, folder)
    with serving(2, policy=DECIDING) as url:
        baton("bench", "--url", url, "--set", f"workload.trace={asked}", "--concurrency", "1")
        recent = httpx.get(f"{url}/admin/requests", params={"limit": str(NUM_DECISIONS)}, timeout=10.0)
    live = [one["decode"] for one in reversed(recent.json()["requests"])]
    events: list[str] = []
    _simulate(asked, latency, 2, policy=DECIDING, write=events.append)
    ended = (line.rstrip() for line in events if line.split()[1] == "ended")
    there = [line.rpartition(">")[2] for line in ended]
    renamings = (dict(zip(sorted(set(there)), names, strict=True)) for names in permutations(sorted(set(live))))
    return max(sum(a == names[b] for a, b in zip(live, there, strict=True)) for names in renamings), NUM_DECISIONS


def trace(load: OpenLoad, folder: Path, *, part: str = "", parts: int = 1) -> Path:
    """In Mooncake's format: the same for the same part of a load."""
    chance, at_s, lines = random.Random(f"{load.name} {part}"), 0.0, []
    for number in range(load.num_requests // parts):
        at_s += chance.expovariate(load.rate)
        line = {
            "timestamp": round(at_s * 1000),
            "input_length": chance.randint(*load.prompts),
            "output_length": chance.randint(*load.answers),
        }
        beginning = chance.randrange(6) if chance.random() < 1 / 3 else 100 + number
        blocks = -(-line["input_length"] // 512)
        lines.append(line | {"hash_ids": [beginning * 10 + place for place in range(blocks)]})
    file = folder / f"{load.name} {part}.jsonl".replace(" ", "-")
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def show(latency: Calibrated, compared: Sequence[Compared], same: int, num: int) -> None:
    console = Console(width=120)
    console.print(str(latency))
    table = Table("means in ms", "TTFT live", "simulated", "foretold", "TPOT live", "simulated", "foretold")
    for one in compared:
        (ttft, tpot), (ttft_foretold, tpot_foretold) = one.errors, one.errors_foretold
        table.add_row(
            one.load.name, f"{one.live.ttft_s * 1000:.1f}", f"{ttft:+.1%}", f"{ttft_foretold:+.1%}",
            f"{one.live.tpot_s * 1000:.2f}", f"{tpot:+.1%}", f"{tpot_foretold:+.1%}",
        )  # fmt: skip
    console.print(table)
    for calibration, error in farthest(compared).items():
        verdict = "missed" if calibration in missed(compared) else "kept"
        console.print(f"{calibration}: at most {error:+.1%} off, the aim of {AIM:.0%} is {verdict}")
    console.print(f"the same worker was chosen for {same} of {num} requests ({DECIDING})")


if __name__ == "__main__":
    typer.run(main)
