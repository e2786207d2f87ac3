"""Ray's view of a rank: one actor, one process. Shells: what happens in them is `cluster.rank`'s.

Ray knows this module by name on every node, so nothing here may reach torch or Ray when it is imported.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence

from cluster.rank import Event, Logged, Orders, Rank


class RankActor:
    """An async actor. `num_threads` is set before torch is imported, which reads it once."""

    def __init__(self, num_threads: int) -> None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(num_threads)
        self._rank: Rank | None = None

    async def meeting_place(self, host: str) -> tuple[str, int]:
        """What the other ranks reach this process by (`host`, or its node's address), and a port that is free."""
        import ray

        address = host or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, int(probe.getsockname()[1])

    async def start(self, orders: Orders) -> int:
        """Returns the process id."""
        self._rank = rank = Rank()
        logging.getLogger("baton").addHandler(_Relay(rank))
        logging.getLogger("baton").setLevel(logging.INFO)
        rank.start(orders)
        return os.getpid()

    async def news(self) -> Sequence[Event]:
        assert self._rank is not None, "start() comes first"
        return await self._rank.news()

    async def stop(self) -> None:
        if self._rank is not None:
            await self._rank.stop()


class _Relay(logging.Handler):
    """Sends what is logged here to the supervisor's log: people look there."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(logging.INFO)
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        self._rank.tell(Logged(level=record.levelno, message=self.format(record)))
