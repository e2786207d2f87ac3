"""Gives a running worker another role: its weights, its lanes and its cached blocks stay.

order ─▶ drain: no new work, sequences move ─▶ nothing runs, no gateway counts on it ─▶ another role, new work
           └── another order, or a drain: this change ends, and the worker takes work in its present role
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from protos.errors import InvalidRequest
from protos.values import WorkerRole
from workers.engine.engine import Engine
from workers.rpc.loop import EngineLoop
from workers.rpc.worker_servicer import WorkerServicer
from workers.scheduling.role import Role

MakeRole = Callable[[], Role]
"""Makes a role for the worker's engine over the parts of its present one. Called while the engine is idle."""


class RoleChange:
    """Changes the role on one event loop. `roles`: the possible ones; `idle` returns when nothing runs; `changed` gets
    each new role."""

    def __init__(
        self,
        role: WorkerRole,
        roles: Mapping[WorkerRole, MakeRole],
        *,
        engine: Engine,
        loop: EngineLoop,
        servicer: WorkerServicer,
        idle: Callable[[], Awaitable[None]],
        changed: Callable[[WorkerRole], None],
    ) -> None:
        self._role = role
        self._roles = roles
        self._engine = engine
        self._loop = loop
        self._servicer = servicer
        self._idle = idle
        self._changed = changed
        self._to = role
        self._task: asyncio.Task[None] | None = None

    def order(self, role: WorkerRole | None) -> None:
        """Begins the change to a role, or ends the one under way (None, or the present role). Raises InvalidRequest for
        a role that this worker cannot have."""
        role = role or self._role
        if role is not self._role and role not in self._roles:
            names = ", ".join(self._roles) or "none"
            raise InvalidRequest(f"a {self._role} worker cannot become a {role} worker; roles: {names}", param="role")
        if role is self._to:
            return
        self._to = role
        self.cancel()
        if role is self._role:
            self._loop.post(self._resume)
        else:
            self._task = asyncio.create_task(self._change(role), name=f"change to {role}")

    def cancel(self) -> None:
        """Ends the change under way; the worker goes on draining."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _resume(self) -> None:
        self._engine.resume()
        self._servicer.send_load()

    async def _change(self, role: WorkerRole) -> None:
        def drain() -> None:
            self._engine.drain()
            self._servicer.send_load()

        def swap() -> bool:
            if self._to is not role or self._engine.has_work():
                return False
            self._engine.resume(self._roles[role]())
            self._servicer.send_load(role)
            return True

        await self._loop.call(drain)
        while True:
            await self._idle()
            await self._servicer.disowned()
            if await self._loop.call(swap):
                break
        self._role, self._task = role, None
        self._changed(role)
