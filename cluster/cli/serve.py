"""`baton serve` and `baton up`: a whole cluster in the foreground, supervisor and gateway on one event loop, or
the gateway in processes of its own.

listen ─▶ Ray starts │ router is built ─▶ workers start ─▶ ready: banner ─▶ ... ─▶ Ctrl-C
stop: no new requests ─▶ running ones finish ─▶ workers end ─▶ Ray ends          (twice: all at once)
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cluster.capacity.controller import FleetController
from cluster.cli import options
from cluster.config.cluster_config import ClusterConfig, PoolsConfig
from cluster.config.revised import digest_of, reviser
from cluster.config.settings import read_file, setting
from cluster.config.several_models import TABLE
from cluster.discovery.members import AnnouncedMembers
from cluster.gateway.run import open_faces
from cluster.hub.cached_models import fitting_models
from cluster.hub.local_models import with_local_models
from cluster.planner.planned_fleet import PlannedFleet
from cluster.process.gc_tuning import collect_rarely
from cluster.process.logs import LogFormat, ResultConsole, terminal
from cluster.process.signals import StopSignal, stopped, stopping
from cluster.ray.machine_part import MachinePart, parts, visible_gpus
from cluster.ray.pools import Pools
from cluster.supervision.preflight import check_adapter_names, check_feasible, check_files
from cluster.supervision.start_progress import Bars
from protos.errors import Misconfigured
from protos.hints import counted, listed
from router.fleet_owner import DesiredFleet
from workers.free_memory import free_ram_bytes
from workers.worker_config import GPU_FRACTION, RAM_FRACTION, WorkerConfig

if TYPE_CHECKING:
    from cluster.discovery.members import Publish
    from cluster.gateway.gateway_server import GatewayServer
    from cluster.gateway.replicas import Replicas
    from protos.values import WorkerInfo

log = logging.getLogger("baton.cluster")

ModelPath = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="A folder, a GGUF file, or a hub's name, as Qwen/Qwen3-0.6B.")
]
SETTINGS = ("model", "served_name", *options.POOLS, *options.GATEWAY, *options.PLANNER, "ray.address")
DEMO = {"model": str(Path(__file__).resolve().parents[2] / "demo" / "model"), "served_name": "demo"}


class ServedFleet:
    """The workers of one model, and the owner of their desired number."""

    def __init__(self, config: ClusterConfig, bars: Bars, part: MachinePart | None) -> None:
        self.pools = Pools(config, bars, part)
        configured = DesiredFleet(counts=dict(config.pools.counts()))
        controller = FleetController(self.pools, configured, revise=reviser(config), origin=digest_of(config))
        self.owner = PlannedFleet(controller, config.planner_settings())
        self.counts = config.pools.counts()


class ServedCluster:
    """Everything that `baton serve` runs, for one model or several."""

    def __init__(self, configs: Sequence[ClusterConfig], console: Console, log_format: LogFormat) -> None:
        first = configs[0].with_token()  # one token, because one gateway calls the workers of all
        self._configs = configs = [first, *(replace(one, peers=first.peers) for one in configs[1:])]
        self._log_format = log_format
        self._console = console
        self._bars = Bars(console)
        self._fleets = [
            ServedFleet(config, self._bars, part) for config, part in zip(configs, _parts(configs), strict=True)
        ]
        self._front: GatewayServer | Replicas | None = None
        self._serves = False

    async def run(self) -> None:
        """Runs until cancelled. Raises BatonError if it cannot start, or if a part of it cannot continue."""
        with self._bars:
            preparing = asyncio.gather(*(one.pools.prepare() for one in self._fleets))
            try:
                owners = [one.owner for one in self._fleets]
                front = self._front = open_faces(self._configs, self._log_format, fleet_owners=owners)
                await front.start()
                await preparing
            finally:
                preparing.add_done_callback(_retrieve)  # if the gateway fails, its error is raised
                preparing.cancel()
            collect_rarely()
            for fleet, announcer in zip(self._fleets, await self._announcers(front), strict=True):
                await fleet.pools.start(announcer)
            await asyncio.gather(*(one.pools.ready() for one in self._fleets))
            await front.ready()
        self._serves = True
        for one in self._fleets:
            one.owner.start()
        self._show_ready(front)
        ended = [asyncio.ensure_future(one.pools.wait()) for one in self._fleets]
        ended.append(asyncio.ensure_future(front.wait()))
        try:
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                if task.done():
                    task.result()
        finally:
            for task in ended:
                task.cancel()

    async def stop(self) -> None:
        """Stops in order, within the configured times. If cancelled, it leaves the rest to `end`."""
        grace_s = self._configs[0].supervision.grace_s if self._serves else 0.0
        log.info("%s; Ctrl-C again stops at once", stopping(grace_s))
        if self._front is not None:
            await self._front.stop(grace_s)
        await asyncio.gather(*(one.pools.stop() for one in self._fleets))

    async def end(self) -> None:
        """Always runs last: it leaves no process behind."""
        if self._front is not None:
            await self._front.stop(0.0)
        for one in self._fleets:
            await one.owner.close()
        for one in self._fleets:
            await one.pools.end()

    async def _announcers(self, front: GatewayServer | Replicas) -> Sequence[Publish]:
        from cluster.gateway.gateway_server import GatewayServer

        if isinstance(front, GatewayServer):
            return [AnnouncedMembers(one.fleet).publish for one in front.backends]
        return [await front.announcer(config.fleet, fleet.owner) for config, fleet in self._each()]

    def _show_ready(self, front: GatewayServer | Replicas) -> None:
        if not self._console.is_terminal:
            models = listed([one.router.model_name for one in self._configs])
            log.info("serving %s at %s, gRPC on port %d", models, front.url, front.grpc_port)
        if self._log_format is LogFormat.JSON:
            return  # a reader of both stdout and stderr finds it in the log
        where = f"at [bold cyan]{front.url}[/], in a browser too (gRPC: port {front.grpc_port}), ready: "
        lines = [f"[bold]{escape(one.router.model_name)}[/] {{}}{_pools(fleet)}. " for one, fleet in self._each()]
        lines = [line.format(where if number == 0 else "beside it: ") for number, line in enumerate(lines)]
        chosen = [
            f"{'' if len(self._fleets) == 1 else config.router.model_name + ': '}{line}"
            for config, fleet in self._each()
            for line in choices(config.worker, fleet.pools.reports())
        ]
        text = "\n".join([*chosen, "", front.example()])
        ResultConsole().say("\n".join(lines) + f"Ctrl-C stops it.\n\n{escape(text)}\n")

    def _each(self) -> Iterable[tuple[ClusterConfig, ServedFleet]]:
        return zip(self._configs, self._fleets, strict=True)


def _pools(fleet: ServedFleet) -> str:
    plan = fleet.pools.plans[0]
    pools = " + ".join(f"{count} {role}" for role, count in fleet.counts.items() if count)
    return f"{pools}, tensor parallel {plan.num_ranks}, on {plan.device}"


def choices(worker: WorkerConfig, reports: Sequence[WorkerInfo]) -> Sequence[str]:
    """Returns what the workers report of themselves, a line for each choice, with its reason."""
    if not reports:
        return []
    info, defaults = reports[0], WorkerConfig(model=worker.model)
    rooms = [
        f"{role} {report.num_blocks * report.layout.stored_bytes / 2**30:.2f} GiB for "
        f"{counted(report.num_blocks * report.layout.block_size, 'token')}"
        for role, report in {report.role: report for report in reports}.items()
    ]
    if is_gpu := info.device == "cuda":
        size = f"{worker.memory_fraction or GPU_FRACTION:g} of the GPU's memory, less weights and the largest step"
    else:
        size = f"at most {worker.memory_fraction or RAM_FRACTION:g} of the RAM that was free"
    is_whole = info.max_model_len >= info.model_len
    length = "the model's own" if is_whole else f"the KV cache holds no more of the model's {info.model_len:,}"
    is_off = info.speculation != worker.speculate
    drafts = f"{info.speculation}{': auto found no kernel that gives drafts the bits of decoding' if is_off else ''}"
    lines = (
        ("device", "device", info.device, f"{'a' if is_gpu else 'no'} GPU for every rank"),
        ("dtype", "dtype", f"{info.dtype}, weights {info.weights}", "float32 if the checkpoint is, else bfloat16"),
        ("KV", "num_blocks", f"{info.layout.kv_dtype}, {', '.join(rooms)}", size),
        ("context", "max_model_len", counted(info.max_model_len, "token"), length),
        ("speculation", "speculate", drafts, "the default"),
    )
    return [
        f"{name}: {value} ({why if getattr(worker, key) == getattr(defaults, key) else f'worker.{key}'})"
        for name, key, value, why in lines
    ]


def on_one_gpu(config: ClusterConfig) -> ClusterConfig:
    """A machine with GPUs for one worker gets a colocated one, unless the settings name pools or a CPU."""
    worker = config.worker
    if config.ray.address or worker.device == "cpu" or config.planner.autoscale or config.pools != PoolsConfig():
        return config
    if not worker.tp <= (num_gpus := len(visible_gpus())) < 2 * worker.tp:
        return config
    log.info("one worker computes prompts and answers: two pools take %d GPUs, %d here", 2 * worker.tp, num_gpus)
    return replace(config, pools=PoolsConfig(colocated=1))


def _retrieve(ended: asyncio.Future[list[None]]) -> None:
    """Keeps asyncio from logging an error that was never retrieved."""
    if not ended.cancelled():
        ended.exception()


def _parts(configs: Sequence[ClusterConfig]) -> Sequence[MachinePart | None]:
    """Returns each model's part of this machine, if several models have a private Ray."""
    if len(configs) == 1 or configs[0].ray.address:
        return [None] * len(configs)
    return parts(configs, len(os.sched_getaffinity(0)), visible_gpus())


def with_batches(config: ClusterConfig) -> ClusterConfig:
    """Files and batches of one machine are in the user's state directory, unless the settings name a place."""
    batch = config.router.batch
    if batch.folder or config.router.database or config.ray.address:
        return config
    folder = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "baton" / "batches"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY))
    except OSError as error:
        log.warning("no files are kept and no batches run: %s: %s; router.batch.folder=FOLDER", folder, error.strerror)
        return config
    return replace(config, router=replace(config.router, batch=replace(batch, folder=str(folder))))


async def run_deployment(
    configs: Sequence[ClusterConfig], console: Console, log_format: LogFormat = LogFormat.TEXT
) -> bool:
    """Serves until a signal. Returns whether it was stopped in order. Raises BatonError."""
    configs = [with_batches(config) for config in configs]
    check_adapter_names(configs)
    for config in configs:
        config.check_model()
        check_feasible(config)
        check_files(config)
    stop = StopSignal()
    deployment = ServedCluster(configs, console, log_format)
    try:
        await stop.before(deployment.run())
        in_order = await stop.patiently(deployment.stop())
    finally:
        await deployment.end()
    log.info("%s", stopped(in_order))
    return in_order


@options.takes_settings(*SETTINGS, several=True)
def serve(given: options.GivenSettings, path: ModelPath = None, log_format: options.Log = LogFormat.TEXT) -> None:
    """Serve a model until Ctrl-C: a gateway, and prefill and decode workers that Ray places and Baton supervises."""
    _serve(given, given.configs(**_model_given_once(given, path)), log_format)


@options.takes_settings(*SETTINGS, several=True)
def up(given: options.GivenSettings, path: ModelPath = None, log_format: options.Log = LogFormat.TEXT) -> None:
    """Serve a model until Ctrl-C: by default the demo model that ships with Baton."""
    model = _model_given_once(given, path)
    if not model and not {"model", TABLE} & given.flags.keys():
        terminal(log_format)
        _warn_unused(given.file, given.further)
        model = DEMO | given.flags
        if fitting := " or ".join(f"`baton up {name}`" for name in fitting_models(free_ram_bytes())):
            log.info("this is the demo model; this machine also has room for %s", fitting)
    _serve(given, given.configs(**model), log_format)


def _model_given_once(given: options.GivenSettings, path: str | None) -> dict[str, str]:
    """Raises Misconfigured."""
    if path is not None and (named := given.flags.get("model") or given.flags.get(TABLE)):
        shown = named if isinstance(named, str) else f"{next(iter(named))}=..."
        raise Misconfigured(f"the model is given twice, as {path} and as --model {shown}: give it once", param="model")
    return {} if path is None else {"model": path}


def _serve(given: options.GivenSettings, configs: Sequence[ClusterConfig], log_format: LogFormat) -> None:
    import uvloop

    console = terminal(log_format, access_log=configs[0].router.http.access_log)
    configs = [with_local_models(config) for config in configs]
    if len(configs) == 1:
        configs = [on_one_gpu(configs[0])]
    if given.workers is not None:
        log.info(
            "--workers %d: colocated, each computes prompts and answers; two pools: --prefill, --decode", given.workers
        )
    if not uvloop.run(run_deployment(configs, console, log_format)):
        raise typer.Exit(130)


def _warn_unused(file: Path | None, further: Sequence[str]) -> None:
    """Warns of models in the file, which may be for another verb, and drops them. Raises Misconfigured for models in
    `--set`."""
    for one in further:
        if "model" in (table := setting(one)):
            raise Misconfigured(
                f"--set {shlex.quote(one)}: without --model `baton up` serves the demo model: use `baton up --model "
                f"{shlex.quote(str(table['model']))}`",
                param="model",
            )
        if TABLE in table:
            problem = f"--set {shlex.quote(one)}: without --model `baton up` serves the demo model"
            raise Misconfigured(f"{problem}: use `baton up --model NAME=PATH`, or `baton serve`", param="model")
    in_file = read_file(file) if file is not None else {}
    if unused := [name for name in (*DEMO, TABLE) if name in in_file and in_file[name] != DEMO.get(name)]:
        log.warning(
            "--config %s: no effect here: %s: `baton up` serves the demo model; `baton serve --config %s` serves the "
            "file's", shlex.quote(str(file)), ", ".join(unused), shlex.quote(str(file)),
        )  # fmt: skip
