"""`baton`, whose `serve` has as many decode workers as the last signal says: SIGUSR1 two, SIGUSR2 one."""

from __future__ import annotations

import asyncio
import logging
import signal

from cluster.cli import main as cli
from cluster.cli import serve
from cluster.config.config import PoolsConfig

SIZES = {signal.SIGUSR1: 2, signal.SIGUSR2: 1}
log = logging.getLogger("baton.cluster")


class ResizedDeployment(serve.ServedCluster):
    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number, size in SIZES.items():
            loop.add_signal_handler(number, self._start_resizing, size)
        await super().run()

    def _start_resizing(self, size: int) -> None:
        self._resizing = asyncio.create_task(self._resize(size))

    async def _resize(self, size: int) -> None:
        await self._pools.resize(PoolsConfig(prefill=1, decode=size))
        log.info("there are %d decode workers", size)


def main() -> None:
    serve.ServedCluster = ResizedDeployment  # type: ignore[misc]
    cli.main()
