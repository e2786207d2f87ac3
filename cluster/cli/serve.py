"""`baton serve` and `baton up`: a whole cluster in the foreground, supervisor and gateway on one event loop (ADR 5), or
the gateway in processes of its own.

listen ─▶ Ray starts │ router is built ─▶ workers start ─▶ ready: banner ─▶ ... ─▶ Ctrl-C
stop: no new requests ─▶ running ones finish ─▶ workers end ─▶ Ray ends          (twice: all at once)
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cluster.cli import options
from cluster.config.config import ClusterConfig
from cluster.config.settings import read_file, setting
from cluster.discovery.base import DirectAnnouncer
from cluster.gateway.run import open_faces
from cluster.process.gc_tuning import collect_rarely
from cluster.process.logs import LogFormat, ResultConsole, terminal
from cluster.process.ports import listen_for_gateway
from cluster.process.signals import StopSignal, stopped, stopping
from cluster.ray.pools import Pools
from cluster.supervision.preflight import check_feasible, check_files
from cluster.supervision.progress import Bars
from protos.errors import Misconfigured

if TYPE_CHECKING:
    from cluster.gateway.process_supervisor import GatewayProcesses
    from cluster.gateway.server import GatewayServer

log = logging.getLogger("baton.cluster")

ModelPath = Annotated[str | None, typer.Argument(metavar="MODEL", help="As --model: a folder, or a GGUF file.")]
DEMO = {"model": str(Path(__file__).resolve().parents[2] / "demo" / "model"), "served_name": "demo"}


class ServedCluster:
    """Everything that `baton serve` runs."""

    def __init__(
        self, config: ClusterConfig, listening: socket.socket, console: Console, log_format: LogFormat
    ) -> None:
        self._config = config = config.with_token()
        self._log_format = log_format
        self._listening = listening
        self._console = console
        self._bars = Bars(console)
        self._pools = Pools(config, self._bars)
        self._front: GatewayServer | GatewayProcesses | None = None
        self._serves = False

    async def run(self) -> None:
        """Runs until cancelled. Raises BatonError if it cannot start, or if a part of it cannot continue."""
        with self._bars:
            preparing = asyncio.create_task(self._pools.prepare())
            try:
                front = self._front = open_faces(self._config, self._listening, self._log_format)
                await front.start()
                await preparing
            finally:
                preparing.cancel()
            collect_rarely()
            await self._pools.start(DirectAnnouncer(front.fleet))
            await self._pools.ready()
            await front.ready()
        self._serves = True
        self._show_ready(front)
        ended = [asyncio.ensure_future(self._pools.wait()), asyncio.ensure_future(front.wait())]
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
        grace_s = self._config.supervision.grace_s if self._serves else 0.0
        log.info("%s; Ctrl-C again stops at once", stopping(grace_s))
        if self._front is not None:
            await self._front.stop(grace_s)
        await self._pools.stop()

    async def end(self) -> None:
        """Always runs last: it leaves no process behind."""
        if self._front is not None:
            await self._front.stop(0.0)
        await self._pools.end()
        self._listening.close()

    def _show_ready(self, front: GatewayServer | GatewayProcesses) -> None:
        if not self._console.is_terminal:
            log.info("serving %s at %s, gRPC on port %d", front.model, front.url, front.grpc_port)
        if self._log_format is LogFormat.JSON:
            return  # a reader of both stdout and stderr finds it in the log
        plan, counts = self._pools.plans[0], self._config.pools.counts()
        pools = " + ".join(f"{count} {role}" for role, count in counts.items() if count)
        ResultConsole().say(
            f"[bold]{escape(front.model)}[/] at [bold cyan]{front.url}[/], in a browser too (gRPC: port "
            f"{front.grpc_port}), ready: {pools}, tensor parallel {plan.num_ranks}, on {plan.device}. "
            f"Ctrl-C stops it.\n\n{escape(front.example())}\n"
        )


async def run_deployment(config: ClusterConfig, console: Console, log_format: LogFormat = LogFormat.TEXT) -> bool:
    """Serves until a signal. Returns whether it was stopped in order. Raises BatonError."""
    config.check_model()
    check_feasible(config)
    check_files(config)
    stop = StopSignal()
    router = config.router
    listening = listen_for_gateway(router.host, router.port, router.grpc_port)
    deployment = ServedCluster(config, listening, console, log_format)
    try:
        await stop.before(deployment.run())
        in_order = await stop.patiently(deployment.stop())
    finally:
        await deployment.end()
    log.info("%s", stopped(in_order))
    return in_order


@options.takes_settings("model", "served_name", *options.POOLS, *options.GATEWAY, "ray.address")
def serve(given: options.GivenSettings, path: ModelPath = None, log_format: options.Log = LogFormat.TEXT) -> None:
    """Serve a model until Ctrl-C: a gateway, and prefill and decode workers that Ray places and Baton supervises."""
    if path is not None and "model" in given.flags:
        raise Misconfigured(
            f"the model is given twice, as {path} and as --model {given.flags['model']}: give it once", param="model"
        )
    _serve(given, given.config(**({} if path is None else {"model": path})), log_format)


@options.takes_settings("served_name", *options.POOLS, *options.GATEWAY, "ray.address")
def up(given: options.GivenSettings, log_format: options.Log = LogFormat.TEXT) -> None:
    """Serve the demo model that ships with Baton until Ctrl-C."""
    terminal(log_format)
    _warn_unused(given.file, given.further)
    _serve(given, given.config(**DEMO | given.flags), log_format)


def _serve(given: options.GivenSettings, config: ClusterConfig, log_format: LogFormat) -> None:
    import uvloop

    console = terminal(log_format, access_log=config.router.http.access_log)
    if given.workers is not None:
        log.info(
            "--workers %d: colocated, each computes prompts and answers; two pools: --prefill, --decode", given.workers
        )
    if not uvloop.run(run_deployment(config, console, log_format)):
        raise typer.Exit(130)


def _warn_unused(file: Path | None, further: Sequence[str]) -> None:
    """Drops a model in the file, which may be for another verb; refuses one in `--set`. Raises Misconfigured."""
    for one in further:
        if "model" in (table := setting(one)):
            raise Misconfigured(
                f"--set {shlex.quote(one)}: `baton up` serves the demo model: use `baton serve --model "
                f"{shlex.quote(str(table['model']))}`",
                param="model",
            )
    in_file = read_file(file) if file is not None else {}
    if unused := [name for name in DEMO if name in in_file and in_file[name] != DEMO[name]]:
        log.warning(
            "--config %s: no effect here: %s: `baton up` serves the demo model; `baton serve --config %s` serves the "
            "file's", shlex.quote(str(file)), ", ".join(unused), shlex.quote(str(file)),
        )  # fmt: skip
