"""Whether each line of a batch has one result although gateway processes are killed, and how much memory they need.

    python -m benchmarks.batches.exactly_once --lines 50000 --kills 20

Processes run a batch of one folder over a model that answers at once: their time is that of a gateway. One of them is
killed by SIGKILL again and again, and another is started. Memory is the growth of a process's largest resident size,
VmHWM, from before its first batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from protos.values import Adapter, FinishReason, Profile, WorkerStats
from router.batches.open_batches import open_runner
from router.files.batch_storage import BatchStorage, open_storage
from router.files.records import StoredBatch, StoredFile, new_id
from router.gateway import open_gateway
from router.jobs import AdapterReport, Job, TokenDelta, WorkerView
from router.router_config import BatchConfig, RouterConfig
from router.traces.request_trace import RequestTraces

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
CHAT = "/v1/chat/completions"
LEASE_S = 1.0


class _ReadyFleet:
    """A fleet without workers that is always ready: its model is `_answer`."""

    def ready(self) -> bool:
        return True

    def asleep(self) -> str:
        return ""

    def degraded(self) -> str:
        return ""

    def status(self) -> Sequence[WorkerView]:
        return ()

    def adapters(self) -> Mapping[str, Adapter]:
        return {}

    def stored_as(self, revision: str) -> str:
        return ""

    async def load_adapter(self, name: str, path: str) -> AdapterReport:
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> AdapterReport:
        raise NotImplementedError

    async def stats(self, worker_id: str) -> WorkerStats:
        raise NotImplementedError

    async def profile(self, worker_id: str, recording: bool | None = None) -> Profile:
        raise NotImplementedError

    async def drain(self, worker_id: str) -> int:
        raise NotImplementedError


async def _answer(job: Job) -> AsyncGenerator[TokenDelta, None]:
    await asyncio.sleep(0)
    yield TokenDelta(token_ids=(100, 101, 102), finish_reason=FinishReason.LENGTH)


def storage_at(folder: Path) -> BatchStorage:
    return open_storage(folder, max_file_bytes=2**30, max_lines=10**6)


def resident_kb(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


async def run_process(folder: Path) -> None:
    """A gateway process's part in batches. Writes its memory down once a second."""
    gateway = open_gateway(RouterConfig(model_path=MODEL, model_name="demo"), generate=_answer, fleet=_ReadyFleet())
    storage = storage_at(folder)
    config = BatchConfig(lease_s=LEASE_S)
    runner = open_runner(
        config, gateway, storage, generate=_answer, records=RequestTraces(), registry=CollectorRegistry()
    )
    before = resident_kb("VmRSS")
    running = asyncio.create_task(runner.run())
    while not running.done():
        await asyncio.sleep(0.2)
        print(resident_kb("VmHWM") - before, flush=True)


def uploaded(storage: BatchStorage, num_lines: int, line_bytes: int) -> StoredBatch:
    file_id, now = new_id("file-"), time.time()
    with tempfile.TemporaryFile() as file:
        for start in range(0, num_lines, 1000):
            lines = []
            for number in range(start, min(start + 1000, num_lines)):
                content = f"family {number % 20}. ".ljust(line_bytes, "x") + str(number)
                body = {"model": "demo", "max_tokens": 3, "messages": [{"role": "user", "content": content}]}
                lines.append(json.dumps({"custom_id": str(number), "method": "POST", "url": CHAT, "body": body}))
            file.write("".join(f"{line}\n" for line in lines).encode())
        num_bytes = file.tell()
        storage.files.contents.store(file_id, file)
    storage.files.add(
        StoredFile(id=file_id, tenant="", filename="lines", purpose="batch", bytes=num_bytes, created_s=now)
    )
    batch = StoredBatch(
        id=new_id("batch_"), tenant="", key_id="", api="openai", endpoint=CHAT, model="demo", input_file_id=file_id,
        window_text="24h", created_s=now, expires_s=now + 86_400,
    )  # fmt: skip
    storage.batches.add(batch)
    print(f"{num_lines} lines, {num_bytes / 2**20:.0f} MiB")
    return batch


def begin(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.batches.exactly_once", "--process", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> int:
    """The growth of its memory, in kB."""
    process.send_signal(signal.SIGKILL)
    told, _ = process.communicate()
    return max(map(int, told.split()), default=0)


def run(folder: Path, args: argparse.Namespace) -> None:
    storage, rng, begun_s = storage_at(folder), random.Random(args.seed), time.monotonic()
    batch = uploaded(storage, args.lines, args.line_bytes)
    processes = [begin(folder) for _ in range(args.processes)]
    growth, num_kills = 0, 0
    while (found := storage.batches.find("", batch.id, "openai")).status in ("validating", "in_progress", "finalizing"):
        time.sleep(rng.uniform(0.5, 1.5) * args.period)
        if num_kills < args.kills:
            place, num_kills = rng.randrange(len(processes)), num_kills + 1
            growth = max(growth, end(processes[place]))
            processes[place] = begin(folder)
    growth = max(growth, *map(end, processes))
    seen: Counter[str] = Counter()
    for file_id in filter(None, (found.output_file_id, found.error_file_id)):
        size = storage.files.find("", file_id).bytes
        for line in storage.files.contents.read(file_id, 0, size).splitlines():
            seen[json.loads(line)["custom_id"]] += 1
    print(
        f"{found.status} after {num_kills} kills, {found.generation} owners, {time.monotonic() - begun_s:.0f} s: "
        f"{found.completed} answered, {found.failed} failed"
    )
    missing = args.lines - len(seen)
    doubled = sum(count > 1 for count in seen.values())
    print(f"custom_ids: {missing} missing, {doubled} twice; memory grew by {growth / 1024:.0f} MiB at most")
    assert not missing
    assert not doubled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--line-bytes", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--period", type=float, default=3.0, help="mean seconds between two kills")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--process", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        asyncio.run(run_process(args.process))
        return
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), args)


if __name__ == "__main__":
    main()
