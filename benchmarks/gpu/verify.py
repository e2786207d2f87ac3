"""Runs everything that needs a GPU, the cheapest check first, and writes the outcomes (docs/gpu.md).

    python -m benchmarks.gpu.verify --out results            or: make gpu

A GPU is often lent for minutes at a time. So no check begins that could outlast `--budget-s`; the next call with the
same `--out` goes on where this one stopped, and does again only what failed, or what another commit passed. Tests share
the card, `--jobs` checks at a time; what measures has it alone, after them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cluster.bench.measured_on import find_hardware, find_versions

ROOT = Path(__file__).resolve().parents[2]
_TAIL = 4000
SPLIT = {"kernels", "attention", "engine", "features"}
"""Checks of many tests that compile: with pytest-xdist, where it is there, eight processes run them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`arguments` of Python; {out} in them is the folder of the results. `limit_s` is when it is given up. `alone`:
    it measures."""

    name: str
    proves: str
    arguments: tuple[str, ...]
    limit_s: float
    alone: bool = False


def _tests(name: str, proves: str, *arguments: str, limit_s: float = 180.0) -> Check:
    at_once = ("-n", "8") if find_spec("xdist") else ()
    return Check(
        name=name,
        proves=proves,
        arguments=("-m", "pytest", "-q", "--durations=5", *(at_once if name in SPLIT else ()), *arguments),
        limit_s=limit_s,
    )


def _measures(name: str, proves: str, *arguments: str, limit_s: float) -> Check:
    outputs = "--json", f"{{out}}/{name}.json", "--plot", f"{{out}}/{name}.svg"
    return Check(name=name, proves=proves, arguments=(*arguments, *outputs), limit_s=limit_s, alone=True)


CHECKS = (
    _tests(
        "kernels",
        "every kernel against float64, compiled",
        "tests/kernels",
        "--ignore=tests/kernels/test_compile.py",  # needs no GPU
        "--ignore=tests/kernels/test_benchmark.py",  # the same
        limit_s=240.0,
    ),
    _tests(
        "attention",
        "PagedAttention keeps the contract of all backends",
        "tests/contract/test_attention.py",
        "tests/contract/test_latent_attention.py",
    ),
    _tests("engine", "greedy tokens are transformers', with graphs and without", "tests/gpu/test_engine_cuda.py"),
    _tests(
        "features", "drafts, windows, families, quantised weights", "tests/gpu/test_features_cuda.py", limit_s=300.0
    ),
    _tests("steady-state", "no launch waits for the device", "tests/gpu/test_steady_state.py"),
    _tests("host-tier", "evicted blocks come back, and no step waits", "tests/gpu/test_host_tier_cuda.py"),
    _tests("adapters", "rows of several LoRA adapters in one step", "tests/gpu/test_adapters_cuda.py"),
    _tests("ranks", "ranks meet over NCCL, also in a captured graph", "tests/gpu/test_ranks_nccl.py"),
    _tests("moving", "sequences move and prefixes are pulled between GPU workers", "tests/gpu/test_moving_cuda.py"),
    _tests("lanes", "lanes over CUDA IPC, NCCL and host memory", "tests/gpu/test_lanes_cuda.py"),
    _tests(
        "overlap",
        "KV travels while more is computed: a profile shows it",
        "tests/gpu/test_kv_overlap_cuda.py",
        "tests/gpu/test_kv_payloads.py",
    ),
    _tests("dead-peer", "a lane over NCCL outlives a peer that is killed", "tests/gpu/test_nccl_peers.py"),
    _measures("gpu-engine", "decode, prefill, transformers beside", "-m", "benchmarks.gpu.engine", limit_s=150.0),
    _measures("gpu-kernels", "each kernel beside its floor", "-m", "benchmarks.gpu.kernels", limit_s=150.0),
    _measures("gpu-quantised", "quantised products beside bfloat16", "-m", "benchmarks.gpu.quantised", limit_s=120.0),
    _measures(
        "kv-transfer",
        "lanes over NCCL and CUDA IPC beside what bounds them",
        "-m",
        "benchmarks.transfer.lanes",
        "--device",
        "cuda",
        "--requests",
        "0",
        limit_s=180.0,
    ),
    _measures("gpu-sweep", "other tiles", "-m", "benchmarks.gpu.kernels", "--sweep", limit_s=300.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOutcome:
    """`exit_code` None: it was given up."""

    name: str
    proves: str
    command: str
    commit: str
    exit_code: int | None
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        return self.exit_code == 0


def verify(
    checks: Sequence[Check],
    out: Path,
    *,
    budget_s: float,
    commit: str,
    clock: Callable[[], float],
    jobs: int = 1,
    report: Callable[[str], object] = print,
) -> list[CheckOutcome]:
    """Runs what has not passed yet at this commit, as far as the budget goes. All outcomes known are in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "verified.json"
    known = {one["name"]: one for one in json.loads(file.read_text())["outcomes"]} if file.exists() else {}
    start_s = clock()
    outcomes = []
    writing = Lock()

    def do(check: Check) -> None:
        before = known.get(check.name, {})
        if before.get("exit_code") == 0 and before.get("commit") == commit:
            report(f"passed before   {check.name}")
            return
        if clock() - start_s + check.limit_s > budget_s:
            report(f"not begun       {check.name}: may take {check.limit_s:.0f} s; call again")
            return
        outcome = _run(check, out, commit, clock)
        with writing:
            report(
                f"{'passed' if outcome.passed else 'FAILED':15} {check.name} ({outcome.seconds:.0f} s): {check.proves}"
            )
            if not outcome.passed:
                report(outcome.output)
            outcomes.append(outcome)
            known[check.name] = asdict(outcome)
            file.write_text(json.dumps(_record(list(known.values())), indent=2) + "\n")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(do, [check for check in checks if not check.alone]))
    for check in checks:
        if check.alone:
            do(check)
    return outcomes


def _run(check: Check, out: Path, commit: str, clock: Callable[[], float]) -> CheckOutcome:
    command = [sys.executable, *(argument.replace("{out}", str(out.resolve())) for argument in check.arguments)]
    start_s = clock()
    try:
        result = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=check.limit_s, check=False
        )
        exit_code, output = result.returncode, result.stdout
    except subprocess.TimeoutExpired as error:
        exit_code, output = None, error.stdout or b""
    (out / f"{check.name}.log").write_bytes(output)
    return CheckOutcome(
        name=check.name,
        proves=check.proves,
        command=" ".join(["python", *check.arguments]),
        commit=commit,
        exit_code=exit_code,
        seconds=round(clock() - start_s, 1),
        output=output.decode(errors="replace")[-_TAIL:],
    )


def _record(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    return {"hardware": asdict(find_hardware()), "versions": dict(find_versions()), "outcomes": outcomes}


def commit_of(root: Path) -> str:
    """Of the working tree, uncommitted changes included; "unknown" where there is no git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()


def main(
    out: Annotated[Path, typer.Option(help="Where results, logs, figures and plots go.")] = Path("gpu-results"),
    budget_s: Annotated[float, typer.Option(help="Begin nothing that could end later than this.")] = 570.0,
    jobs: Annotated[int, typer.Option(min=1, help="So many checks that are tests share the card.")] = 4,
    only: Annotated[str, typer.Option(help="One check, by name.")] = "",
    listed: Annotated[bool, typer.Option("--list", help="Say what there is to verify, and run nothing.")] = False,
) -> None:
    chosen = [check for check in CHECKS if only in ("", check.name)]
    if not chosen:
        print(f"There is no check {only!r}: choose one of {', '.join(check.name for check in CHECKS)}", file=sys.stderr)
        raise typer.Exit(2)
    if listed:
        for check in chosen:
            print(f"{check.name:14} {check.limit_s:4.0f} s   {check.proves}: python {' '.join(check.arguments)}")
        return
    import torch

    if not torch.cuda.is_available():
        print("torch sees no NVIDIA GPU: nothing was verified.", file=sys.stderr)
        raise typer.Exit(2)
    outcomes = verify(chosen, out, budget_s=budget_s, commit=commit_of(ROOT), clock=time.monotonic, jobs=jobs)
    raise typer.Exit(0 if all(one.passed for one in outcomes) else 1)


if __name__ == "__main__":
    typer.run(main)
