"""What a KV transfer adds to requests, measured from outside: the same prompts, in turn, to three clusters on this CPU.

    colocated              one worker reads and writes
    1P+1D, shm             one reads, another writes: KV goes through shared memory
    1P+1D, gloo            the same over the network

Every worker computes with one thread, one request runs at a time, and no prompt is like one before. The first token
never waits for KV, the second does: so it is the time to the second that a transfer can add to.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from benchmarks.engine.cpu_engine import DEMO
from benchmarks.engine.random_llama import CONFIG, write_checkpoint

LENGTHS = {"demo": (512, 1024, 2048, 4096), "311M": (512, 2048)}
CONTEXT = 8192
NUM_TOKENS = 4
START_S = 120.0
SETTINGS = (
    "worker.num_blocks=1024", "worker.max_model_len=4160", "router.local_prefill_tokens=1",
    "router.ttft_ms=60000", "worker.bind_cores=off",
)  # fmt: skip
CLUSTERS = {
    "colocated": ("colocated",),
    "1P+1D, shm": ("prefill", "decode"),
    "1P+1D, gloo": ("prefill", "decode"),
}
TRANSPORTS = {"1P+1D, shm": "shm", "1P+1D, gloo": "collective"}
BATON = "from cluster.cli.main import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Requests of one length to one cluster: the best times from sent to the first and the second token, and what both
    are more than the best of the colocated worker. Of the time that KV spent on its way, `hidden` is the part in which
    the prompt was still computed."""

    model: str
    cluster: str
    num_tokens: int
    first_s: float
    second_s: float
    first_added_s: float = 0.0
    second_added_s: float = 0.0
    moved_bytes: float = 0.0
    hidden: float = 0.0

    @property
    def share(self) -> float:
        """Of the time to the second token, what being on two workers adds."""
        return self.second_added_s / self.second_s


def ask_clusters(num_requests: int, model: str = "demo") -> list[RequestTimes]:
    """With the demo model or a random one of 311 million parameters, whose answers do not matter."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        folder = make_model(model, Path(scratch) / "model")
        urls = {name: running.enter_context(serving(name, folder, Path(scratch))) for name in CLUSTERS}
        return [one for length in LENGTHS[model] for one in _ask(urls, model, length, num_requests)]


def make_model(model: str, folder: Path) -> Path:
    """With a context as long as the prompts; the random one borrows the other's tokenizer."""
    shutil.copytree(DEMO, folder)
    if model == "demo":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    else:
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
        write_checkpoint(folder, CONFIG | {"max_position_embeddings": CONTEXT, "vocab_size": 4096})
    return folder


def _ask(urls: dict[str, str], model: str, length: int, num_requests: int) -> list[RequestTimes]:
    chance = random.Random(length)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in urls}
    before = {}
    with httpx.Client(timeout=120.0, trust_env=False) as client:
        for number in range(num_requests + 1):
            prompt = [chance.randrange(3, 4000) for _ in range(length)]
            for name in rotated(tuple(urls), number):
                if number == 1:  # the first warms up
                    before[name] = moved(client, urls[name])
                pair = ask(client, urls[name], prompt)
                if number:
                    times[name].append(pair)
        after = {name: moved(client, url) for name, url in urls.items()}
    found = []
    best = {name: tuple(map(min, zip(*own, strict=True))) for name, own in times.items()}
    alone = best["colocated"]
    for name, own in best.items():
        num_bytes, seconds, hidden_s = (now - then for now, then in zip(after[name], before[name], strict=True))
        assert bool(num_bytes) == (name in TRANSPORTS), f"{name} has moved {num_bytes:.0f} bytes"
        found.append(
            RequestTimes(
                model=model,
                cluster=name,
                num_tokens=length,
                first_s=own[0],
                second_s=own[1],
                first_added_s=own[0] - alone[0],
                second_added_s=own[1] - alone[1],
                moved_bytes=num_bytes / num_requests,
                hidden=hidden_s / seconds if seconds else 0.0,
            )
        )
    return found


def rotated(names: Sequence[str], number: int) -> Sequence[str]:
    """Everybody comes first as often as the others."""
    place = number % len(names)
    return (*names[place:], *names[:place])


def ask(client: httpx.Client, url: str, prompt: Sequence[int]) -> tuple[float, float]:
    """Seconds to the first and to the second token."""
    body = {
        "model": "demo", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    start_s = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        arrivals = [time.perf_counter() - start_s for line in response.iter_lines() if _brings_text(line)]
    assert len(arrivals) >= 2, f"{len(arrivals)} pieces came"
    return arrivals[0], arrivals[1]


def _brings_text(line: str) -> bool:
    return line.startswith("data: {") and bool(json.loads(line[6:])["choices"])


def moved(client: httpx.Client, url: str) -> tuple[float, float, float]:
    """Of KV that prefill workers have sent: bytes, seconds on the way, and those of them that were hidden."""
    said = client.get(f"{url}/metrics").text

    def counted(name: str) -> float:
        found = re.search(rf'^baton_pool_{name}_total{{pool="prefill"}} (\S+)', said, re.MULTILINE)
        return float(found[1]) if found else 0.0

    return counted("transfer_bytes"), counted("transfer_seconds"), counted("transfer_hidden_seconds")


@contextmanager
def serving(name: str, model: Path, scratch: Path) -> Iterator[str]:
    """The URL of a gateway and its workers, each a process of one computing thread."""
    roles = CLUSTERS[name]
    settings = [*SETTINGS, *([f"lanes.transport={TRANSPORTS[name]}"] if name in TRANSPORTS else [])]
    common = ["--model", str(model), "--served-name", "demo", *(part for one in settings for part in ("--set", one))]
    port, *ports = _free_ports(1 + len(roles))
    url = f"http://127.0.0.1:{port}"
    commands = [
        ["worker", "--role", role, "--id", f"{role}-0", "--device", "cpu", "--port", str(at), *common]
        for role, at in zip(roles, ports, strict=True)
    ]
    workers = [part for at in ports for part in ("--worker", f"127.0.0.1:{at}")]
    commands.append(["gateway", "--port", str(port), "--grpc-port", "0", *workers, *common])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (scratch / f"{roles[0]}-{port}.log").open("w+") as said:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", BATON, *command], stdout=said, stderr=subprocess.STDOUT, env=environment
            )
            for command in commands
        ]
        try:
            _await_ready(url, processes, Path(said.name))
            yield url
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                process.wait(60)


def _await_ready(url: str, processes: Sequence[subprocess.Popen[Any]], log: Path) -> None:
    until_s = time.monotonic() + START_S
    while not _is_ready(url):
        if any(process.poll() is not None for process in processes) or time.monotonic() > until_s:
            raise SystemExit(f"the cluster did not come up: {log.read_text()[-2000:]}")
        time.sleep(0.2)


def _is_ready(url: str) -> bool:
    try:
        workers = httpx.get(f"{url}/admin/status", timeout=5.0, trust_env=False).json()["workers"]
    except (httpx.HTTPError, ValueError):
        return False
    return bool(workers) and all(worker["state"] == "ready" for worker in workers)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as probes:
        found = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in found]


def asked_table(found: Sequence[RequestTimes]) -> Table:
    table = Table(title="the same prompts to clusters: best times, and what they are more than on one worker")
    heads = (
        "model",
        "tokens",
        "cluster",
        "first token",
        "second",
        "first: more",
        "second: more",
        "share",
        "KV",
        "hidden",
    )
    for head in heads:
        table.add_column(head, justify="right")
    for one in found:
        times = (one.first_s, one.second_s, one.first_added_s, one.second_added_s)
        cells = [f"{seconds * 1000:,.1f} ms" for seconds in times]
        kv = (f"{one.share:.1%}", f"{one.moved_bytes / 2**20:.2f} MiB", f"{one.hidden:.0%}")
        table.add_row(one.model, f"{one.num_tokens:,}", one.cluster, *cells, *(kv if one.moved_bytes else ("", "", "")))
    return table
