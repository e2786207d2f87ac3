"""Measures KV lanes beside their bounds, in the same run. Bounds are raw gloo for the network and memcpy for shared
memory; on a GPU NCCL's own send and receive, and a copy within the card.

    python -m benchmarks.transfer.lanes --json figures.json --plot figures.svg
    python -m benchmarks.transfer.lanes --device cuda           two ranks on one card
    python -m benchmarks.transfer.lanes --tiny                  does the program run?

Blocks are those of Llama 3.1 8B (2 MiB each, 16 tokens), in chunks of 16 as a prefill worker pushes them, between two
processes. The time is that from the first offer until the other process has taken the last payload, in the best of
several rounds, taken in turn, so that what else the machine does hits all of them alike. It should do nothing else.
On a CPU, requests are then sent to real clusters, to see what a transfer adds (benchmarks/transfer/requests.py).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engine.cpu_engine import DEMO, opened
from benchmarks.gpu.machine import name_of, require_gpu
from benchmarks.output import JsonFile, PlotFile, drawing, write_figures
from benchmarks.transfer.destination import (
    CHUNK_BLOCKS,
    LAYOUT,
    Order,
    chunk_sizes,
    free_on_device,
    move_raw,
    play_host,
    raw_group,
    rss_bytes,
    serve,
    serve_alone,
    settle,
)
from benchmarks.transfer.requests import LENGTHS, RequestTimes, ask_clusters, asked_table
from cluster.bench.measured_on import find_hardware
from kvtransfer.lane_rules import LaneConfig, Preference
from kvtransfer.transport import Chunk, LaneLost
from kvtransfer.transports.collective.collective import CollectiveTransport
from protos.values import GenerateRequest, LaneAddress, SamplingParams, Ticket
from workers.models.model_config import read_config

NUM_BUFFERS = 4  # memcpy goes round as many, as a lane's staging does
PROMPTS = (2048, 8192, 32768)
LOCAL_PROMPT = 1024
BOUNDS = {
    "cpu": {"gloo lane": "raw gloo", "shm lane": "memcpy"},
    "cuda": {"nccl lane": "raw nccl", "cuda-ipc lane": "device copy"},
}
LANES: dict[str, Preference] = {
    "gloo lane": "collective", "shm lane": "shm", "nccl lane": "collective", "cuda-ipc lane": "shm",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Numbers of blocks, each moved `num_rounds` times and once before, over the ways of `device`; `num_setups` lanes
    are opened. With `tiny` the other end is not another process."""

    device: str
    blocks: tuple[int, ...] = (1, 4, 16, 64, 256, 512)
    num_rounds: int = 5
    num_setups: int = 20
    tiny: bool = False

    @property
    def bounds(self) -> dict[str, str]:
        return BOUNDS[self.device]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFigure:
    """One way of moving `num_blocks` blocks: seconds of the best round, and CPU seconds of both processes in it."""

    way: str
    num_blocks: int
    seconds: float
    cpu_s: float

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * LAYOUT.block_bytes

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.num_bytes * 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Of one lane: median seconds from the first call to both ends open, resident bytes it adds at either end, and
    device memory, of both ends."""

    way: str
    seconds: float
    source_bytes: float
    destination_bytes: float
    device_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a prompt's KV costs beside its computation at a stated speed. All but the last chunk travel while a later
    one is computed; `exposed_s` is what that one takes, after the prompt's last token."""

    model: str
    way: str
    num_tokens: int
    transfer_s: float
    exposed_s: float
    prefill_s: float

    @property
    def share(self) -> float:
        return self.exposed_s / (self.prefill_s + self.exposed_s)


def source(index: int = 0) -> LaneAddress:
    return LaneAddress(worker_id=f"p{index}", incarnation=1, host="127.0.0.1", port=0)


def ticket_to(destination: LaneAddress) -> Ticket:
    return Ticket(
        ticket_id="t",
        generation=1,
        lease_s=60.0,
        block_ids=(0,),
        num_cached_tokens=0,
        layout=LAYOUT,
        destination=destination,
    )


@contextmanager
def destination(plan: TransferPlan) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    other: Any = (
        threading.Thread(target=serve, args=(there,), daemon=True)
        if plan.tiny
        else context.Process(target=serve_alone, args=(there,), daemon=True)
    )
    other.start()
    yield here
    here.send(Order(what="end"))
    other.join()


def order(what: str, plan: TransferPlan, **more: Any) -> Order:
    return Order(what=what, device=plan.device, **more)


class Sending:
    """The source's end of one lane."""

    def __init__(self, other: Connection, plan: TransferPlan, way: str, rounds: Sequence[tuple[int, ...]]) -> None:
        self._other = other
        self._bell = threading.Event()
        made = CollectiveTransport(device=plan.device, config=LaneConfig(transport=LANES[way]))
        self._sender = made.sender(source(), LAYOUT, wake=self._bell.set)
        other.send(order("lanes", plan, preference=LANES[way], sources=(source(),), rounds=tuple(rounds)))
        self._ticket = ticket_to(other.recv())

    def move(self, sizes: Sequence[int]) -> tuple[float, float]:
        """Seconds, and those of the cores."""
        cpu_s, start_s, first = time.process_time(), time.perf_counter(), 0
        for size in sizes:
            while not self._sender.can_offer(self._ticket):
                self._wait()
            count = size // LAYOUT.block_bytes
            chunk = Chunk(ticket_id="t", generation=1, first_block=first, num_blocks=count)
            self._sender.offer(self._ticket, chunk, self._sender.stage(size).view(torch.bfloat16))
            first += count
        theirs = self._other.recv()
        seconds, ours = time.perf_counter() - start_s, time.process_time() - cpu_s
        while self._sender.busy():
            self._wait()
        return seconds, ours + theirs

    def close(self) -> None:
        self._other.send("enough")
        self._other.recv()
        self._sender.close()

    def _wait(self) -> None:
        self._bell.wait(1.0)
        self._bell.clear()
        assert not any(isinstance(event, LaneLost) for event in self._sender.poll()), "the lane was lost"


class SendingRaw:
    def __init__(self, other: Connection, plan: TransferPlan, rounds: Sequence[tuple[int, ...]]) -> None:
        self._other = other
        self._buffer_B = torch.ones(max(map(max, rounds)), dtype=torch.uint8, device=plan.device)
        other.send(order("raw", plan, rounds=tuple(rounds)))
        self._group, self._store = raw_group(other.recv(), 0, plan.device)

    def move(self, sizes: Sequence[int]) -> tuple[float, float]:
        cpu_s, start_s = time.process_time(), time.perf_counter()
        for size in sizes:
            move_raw(self._group.send, self._buffer_B[:size], 1)
        theirs = self._other.recv()
        return time.perf_counter() - start_s, time.process_time() - cpu_s + theirs

    def close(self) -> None:
        del self._group
        self._store.close()


class Copying:
    def __init__(self, plan: TransferPlan, rounds: Sequence[tuple[int, ...]]) -> None:
        size = max(map(max, rounds))
        self._from_B, self._to_B = (
            [torch.ones(size, dtype=torch.uint8, device=plan.device) for _ in range(NUM_BUFFERS)] for _ in range(2)
        )

    def move(self, sizes: Sequence[int]) -> tuple[float, float]:
        cpu_s, start_s = time.process_time(), time.perf_counter()
        for index, size in enumerate(sizes):
            target, origin = self._to_B[index % NUM_BUFFERS], self._from_B[index % NUM_BUFFERS]
            if target.is_cuda:
                target[:size].copy_(origin[:size])
            else:
                ctypes.memmove(target.data_ptr(), origin.data_ptr(), size)
        settle(self._to_B[0].device)
        return time.perf_counter() - start_s, time.process_time() - cpu_s

    def close(self) -> None:
        pass


def throughput(way: str, plan: TransferPlan, other: Connection) -> list[TransferFigure]:
    """All numbers of blocks, each as often as there are rounds, over one lane."""
    each = plan.num_rounds + 1  # the first warms up
    rounds = [chunk_sizes(count) for count in plan.blocks for _ in range(each)]
    transfers: Any = (
        Sending(other, plan, way, rounds)
        if way in LANES
        else SendingRaw(other, plan, rounds)
        if way.startswith("raw")
        else Copying(plan, rounds)
    )
    taken = [transfers.move(sizes) for sizes in rounds]
    transfers.close()
    figures = []
    for index, count in enumerate(plan.blocks):
        seconds, cpu_s = min(taken[index * each + 1 : (index + 1) * each])
        figures.append(TransferFigure(way=way, num_blocks=count, seconds=seconds, cpu_s=cpu_s))
    return figures


def best(figures: Sequence[TransferFigure]) -> list[TransferFigure]:
    """Of several runs, the best of each way and number of blocks."""
    found: dict[tuple[str, int], TransferFigure] = {}
    for figure in figures:
        key = (figure.way, figure.num_blocks)
        if key not in found or figure.seconds < found[key].seconds:
            found[key] = figure
    return list(found.values())


def set_up(way: str, plan: TransferPlan, other: Connection) -> Setup:
    """Lanes from many sources of this process to one destination, opened one after the other."""
    made = CollectiveTransport(device=plan.device, config=LaneConfig(transport=LANES[way]))
    sources = tuple(source(index) for index in range(plan.num_setups))
    other.send(order("lanes", plan, preference=LANES[way], sources=sources))
    ticket = ticket_to(other.recv())
    senders = [made.sender(who, LAYOUT) for who in sources]
    seconds, before, free_before = [], rss_bytes(), free_on_device(plan.device)
    for sender in senders:
        start_s = time.perf_counter()
        sender.open(ticket)
        while [lane.state for lane in sender.lanes()] == ["opening"]:
            time.sleep(0.0002)
        seconds.append(time.perf_counter() - start_s)
    grown, taken = rss_bytes() - before, free_before - free_on_device(plan.device)
    other.send("enough")
    theirs = other.recv()
    for sender in senders:
        sender.close()
    return Setup(
        way=way,
        seconds=statistics.median(seconds),
        source_bytes=grown / plan.num_setups,
        destination_bytes=theirs / plan.num_setups,
        device_bytes=taken / plan.num_setups,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptModel:
    """How fast prompts are read, and how many bytes of KV a token has."""

    name: str
    tokens_per_s: float
    token_bytes: int


def local_model() -> PromptModel:
    """The demo model, measured here and now."""
    with opened(DEMO) as engine:
        layout = read_config(str(DEMO)).kv_layout(block_size=LAYOUT.block_size, dtype="bfloat16")
        seconds = []
        for attempt in range(4):
            prompt_ids = tuple((attempt * 7919 + index * 31) % 4000 + 3 for index in range(LOCAL_PROMPT))
            request = GenerateRequest(
                request_id=str(attempt), prompt_ids=prompt_ids, sampling=SamplingParams(temperature=0.0, max_tokens=1)
            )
            engine.submit(request, time.monotonic())
            start_s = time.perf_counter()
            while engine.has_work():
                engine.step(time.monotonic())
            seconds.append(time.perf_counter() - start_s)
    return PromptModel(
        name="the demo model, on this machine",
        tokens_per_s=LOCAL_PROMPT / min(seconds),
        token_bytes=layout.block_bytes // layout.block_size,
    )


def prompts(figures: Sequence[TransferFigure], model: PromptModel, lengths: Sequence[int]) -> list[Prompt]:
    """At the rate of the measured number of blocks that is nearest from below."""
    smallest = LAYOUT.block_bytes

    def seconds(way: str, num_bytes: float) -> float:
        measured = [f for f in figures if f.way == way and f.num_bytes <= max(num_bytes, smallest)]
        nearest = max(measured, key=lambda figure: figure.num_bytes)
        return nearest.seconds * num_bytes / nearest.num_bytes

    return [
        Prompt(
            model=model.name,
            way=way,
            num_tokens=num_tokens,
            transfer_s=seconds(way, num_tokens * model.token_bytes),
            exposed_s=seconds(way, min(num_tokens * model.token_bytes, CHUNK_BLOCKS * LAYOUT.block_bytes)),
            prefill_s=num_tokens / model.tokens_per_s,
        )
        for way in dict.fromkeys(figure.way for figure in figures)
        if way in LANES
        for num_tokens in lengths
    ]


def throughput_table(figures: Sequence[TransferFigure], plan: TransferPlan) -> Table:
    table = Table(
        title="blocks from one process to another: GB/s, CPU seconds a GB (both processes'), share of the bound"
    )
    for head in ("blocks", "MiB", *(way for lane, bound in plan.bounds.items() for way in (lane, bound, "share"))):
        table.add_column(head, justify="right")
    of = {(figure.way, figure.num_blocks): figure for figure in figures}
    for count in plan.blocks:
        cells = []
        for lane, bound in plan.bounds.items():
            ours, theirs = of[lane, count], of[bound, count]
            cells += [f"{f.gb_per_s:.2f}  {f.cpu_s_per_gb:.2f} s" for f in (ours, theirs)]
            cells.append(f"{ours.gb_per_s / theirs.gb_per_s:.0%}")
        table.add_row(str(count), f"{count * LAYOUT.block_bytes >> 20:,}", *cells)
    return table


def setup_table(setups: Sequence[Setup], plan: TransferPlan) -> Table:
    table = Table(title=f"one lane of {plan.num_setups}")
    for head in ("lane", "open after", "memory at the source", "at the destination", "on the GPU, both ends"):
        table.add_column(head, justify="right")
    for one in setups:
        sizes = one.source_bytes, one.destination_bytes, one.device_bytes
        memory = (f"{num / 2**20:.2f} MiB" for num in sizes)
        table.add_row(one.way, f"{one.seconds * 1000:.1f} ms", *memory)
    return table


def prompt_table(found: Sequence[Prompt], model: PromptModel) -> Table:
    table = Table(title=f"KV beside the prompt's computation: {model.name}, {model.tokens_per_s:,.0f} tokens/s")
    for head in ("tokens", "lane", "prefill", "transfer", "after the last token", "share of both"):
        table.add_column(head, justify="right")
    for one in found:
        times = (f"{seconds * 1000:,.1f} ms" for seconds in (one.prefill_s, one.transfer_s, one.exposed_s))
        table.add_row(f"{one.num_tokens:,}", one.way, *times, f"{one.share:.1%}")
    return table


def draw(figures: Sequence[TransferFigure], plan: TransferPlan, path: Path) -> None:
    title = find_hardware().cpu if plan.device == "cpu" and not plan.tiny else name_of(plan.device)
    with drawing(path, size=(8, 5)) as [[axis]]:
        for way in (way for pair in plan.bounds.items() for way in pair):
            own = [figure for figure in figures if figure.way == way]
            style = "-o" if way in LANES else "--"
            axis.plot([f.num_blocks for f in own], [f.gb_per_s for f in own], style, label=way)
        axis.set(xscale="log", xlabel="blocks of 2 MiB", ylabel="GB/s", ylim=(0, None), title=title)
        axis.set_xticks(plan.blocks, map(str, plan.blocks))
        axis.legend()


def plan_for(device: str, tiny: bool) -> TransferPlan:
    if tiny:
        return TransferPlan(device=device, blocks=(1, 3), num_rounds=1, num_setups=2, tiny=True)
    return TransferPlan(device=device, num_setups=5) if device == "cuda" else TransferPlan(device=device)


def measure(plan: TransferPlan, runs: int) -> tuple[list[TransferFigure], list[Setup]]:
    ways = [way for pair in plan.bounds.items() for way in pair]
    with destination(plan) as other:
        figures = best([figure for _ in range(runs) for way in ways for figure in throughput(way, plan, other)])
    with destination(plan) as other:  # afresh: what is left of a payload's memory would be taken for a lane's
        return figures, [set_up(way, plan, other) for way in plan.bounds]


def main(
    runs: Annotated[int, typer.Option(help="How often all ways are taken in turn.")] = 2,
    device: Annotated[str, typer.Option(help="cpu, or cuda: two ranks on one card.")] = "cpu",
    tiny: Annotated[bool, typer.Option("--tiny", help="A few blocks: does the program run?")] = False,
    requests: Annotated[int, typer.Option(help="Of each length, to each of three clusters on this CPU; 0: none.")] = 9,
    tokens_per_s: Annotated[float, typer.Option(help="Prefill speed that prompts are set beside.")] = 10_000.0,
    as_json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    require_gpu(device, tiny=tiny or device == "cpu")
    plan = plan_for(device, tiny)
    if not tiny:
        torch.set_num_threads(1)
        play_host("source")
    figures, setups = measure(plan, 1 if tiny else runs)
    stated = PromptModel(
        name="Llama 3.1 8B, its speed stated",
        tokens_per_s=tokens_per_s,
        token_bytes=LAYOUT.block_bytes // LAYOUT.block_size,
    )
    beside = {stated: prompts(figures, stated, PROMPTS)}
    times: list[RequestTimes] = []
    if device == "cpu" and not tiny:
        local = local_model()
        beside[local] = prompts(figures, local, (LOCAL_PROMPT,))
        times = [one for name in LENGTHS for one in ask_clusters(requests, name)] if requests else []
    console = Console(width=150)
    tables = [throughput_table(figures, plan), setup_table(setups, plan)]
    tables += [prompt_table(found, model) for model, found in beside.items()]
    if tiny:
        console.print(name_of(device))
    for table in (*tables, *([asked_table(times)] if times else [])):
        console.print(table)
    write_figures(
        as_json,
        throughput=[asdict(figure) for figure in figures],
        setup=[asdict(one) for one in setups],
        models=[asdict(model) for model in beside],
        prompts=[asdict(one) for found in beside.values() for one in found],
        requests=[asdict(one) for one in times],
    )
    if plot is not None:
        draw(figures, plan, plot)


if __name__ == "__main__":
    typer.run(main)
