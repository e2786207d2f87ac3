"""One worker of the fleet: its state, its load, and the work routed to it that its load does not include yet.

joining ──▶ ready ⇄ draining          ready: takes new work; draining: finishes what it has
   ▲          │
   └── lost ◀─┘   incompatible: answers, but cannot work with the rest; never routed to
                  drained: ended after draining; lost if no successor comes within `SUCCESSOR_S`
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from msgspec.structs import replace

from protos.errors import WorkerLost
from protos.values import (
    Adapter,
    GenerateRequest,
    MoveRequest,
    ReserveRequest,
    StepMessage,
    Ticket,
    WorkerInfo,
    WorkerLoad,
    WorkerRole,
)
from router.fleet.circuit_breaker import CircuitBreaker
from router.fleet.worker_client import Updates, WorkerClient
from router.routing.candidate_columns import LoadRow

SUCCEEDED = "its successor is due"
SUCCESSOR_S = 600.0  # the time that `baton drain` waits: loading large weights takes minutes
UNSUCCEEDED = f"it has drained, and no successor has come for {SUCCESSOR_S / 60:g} minutes"
COUNTS = ("step", "speculation", "num_prompt_tokens", "num_output_tokens")
"""Fields of a load that no decision reads."""
STEPS_TO_SHOW = 2  # the step that runs when a request arrives does not include it; the next step does


class WorkerState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    DRAINED = "drained"
    INCOMPATIBLE = "incompatible"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """The status of a worker. `reason` explains why it is lost, drained, incompatible or still joining.
    `num_host_blocks`: cached blocks in host memory, perhaps also on the device. `tokens_before`: prompt and output
    tokens computed before this gateway connected."""

    worker_id: str
    address: str
    state: WorkerState
    reason: str
    info: WorkerInfo | None
    load: WorkerLoad
    num_routed: int
    num_cached_blocks: int
    num_host_blocks: int = 0
    tokens_before: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class RoutedWork:
    """Work routed to a worker: tokens to prefill, blocks to reserve. `since_step`: the worker's last reported step when
    it got the work."""

    num_tokens: int
    num_blocks: int = 0
    since_step: int | None = None


class Member:
    """A worker across its connections and lives. The fleet changes its state, the dispatcher adds work.

    `on_change` is called with the member and None after each change that may affect its candidate. `credited` is the
    load up to which `LoadTotals` has counted. `reconnect` ends the pause before the next connection.
    """

    def __init__(self, worker_id: str, address: str) -> None:
        self.worker_id = worker_id
        self.address = address
        self.state = WorkerState.JOINING
        self.reason = "not met yet"
        self.info: WorkerInfo | None = None
        self.load = self.credited = WorkerLoad()
        self.client: WorkerClient | None = None
        self.breaker = CircuitBreaker()
        self.reconnect = asyncio.Event()
        self.on_change: Callable[[Member, None], None] | None = None
        self._routed: dict[str, RoutedWork] = {}
        self._num_steps = 0  # reported by the worker
        self._tokens_before: tuple[int, int] | None = None
        self._left_s: float | None = None

    def changed(self) -> None:
        if self.on_change is not None:
            self.on_change(self, None)

    @property
    def role(self) -> WorkerRole | None:
        return self.info.role if self.info is not None else None

    @property
    def block_size(self) -> int | None:
        return self.info.layout.block_size if self.info is not None else None

    @property
    def token_bytes(self) -> float:
        return self.info.layout.block_bytes / self.info.layout.block_size if self.info is not None else 0.0

    @property
    def takes_work(self) -> bool:
        return self.state is WorkerState.READY and self.client is not None and not self.client.lost

    @property
    def is_reconnecting(self) -> bool:
        """Whether a worker that was ready is connected anew, after a pause of this process."""
        return self.state in (WorkerState.READY, WorkerState.JOINING) and not self.takes_work

    @property
    def drains(self) -> bool:
        return self.state is WorkerState.DRAINING

    def connection(self) -> WorkerClient:
        if self.client is None:
            raise WorkerLost(f"worker {self.worker_id} is {self.state}: {self.reason}")
        return self.client

    def connected(self, info: WorkerInfo, client: WorkerClient) -> None:
        if self.info is None or self.info.incarnation != info.incarnation:
            self.load = self.credited = WorkerLoad()
            self._tokens_before = None
            self.breaker.reset()
        self.info, self.client = info, client
        self.changed()

    def changed_role(self, role: WorkerRole) -> bool:
        if self.info is None or self.info.role is role:
            return False
        self.info = replace(self.info, role=role)
        self.changed()
        return True

    def changed_adapters(self, adapters: tuple[Adapter, ...]) -> bool:
        if self.info is None or self.info.adapters == adapters:
            return False
        self.info = replace(self.info, adapters=adapters)
        return True

    def disconnected(self) -> None:
        self.client = None
        self.changed()

    def enter(self, state: WorkerState, reason: str = "", *, now: float) -> bool:
        """Changes the state; returns whether anything changed. A draining worker whose connection ends is `drained`; it
        is `lost` if no successor has come within `SUCCESSOR_S`."""
        if state is not WorkerState.LOST:
            self._left_s = None
        elif self.state is WorkerState.DRAINING:
            self._left_s = now
        if self._left_s is not None:
            is_due = now < self._left_s + SUCCESSOR_S
            state, reason = (WorkerState.DRAINED, SUCCEEDED) if is_due else (state, UNSUCCEEDED)
        changed = (state, reason) != (self.state, self.reason)
        self.state, self.reason = state, reason
        self.changed()
        return changed

    # -- work under way ------------------------------------------------------------------------------------------------

    def route(self, name: str, num_tokens: int, num_blocks: int = 0, *, is_there: bool = False) -> None:
        """Counts a request with `num_tokens` to prefill that was routed to this worker, until its load includes it.
        `is_there`: the worker has it already."""
        self._routed[name] = RoutedWork(num_tokens, num_blocks, self._num_steps if is_there else None)
        self.changed()

    def drop_routed(self, name: str) -> None:
        if self._routed.pop(name, None) is not None:
            self.changed()

    async def reserve(self, request: ReserveRequest) -> Ticket:
        ticket = await self.connection().reserve(request)
        self._submitted(request.request_id)
        return ticket

    async def renew(self, request: ReserveRequest) -> None:
        await self.connection().renew(request)

    def submit(self, request: GenerateRequest) -> Updates:
        updates = self.connection().submit(request)
        self._submitted(request.request_id)
        return updates

    def move(self, request: MoveRequest) -> None:
        self.connection().move(request)

    def set_unread(self, request_id: str, is_unread: bool) -> None:
        if self.client is not None:
            self.client.set_unread(request_id, is_unread)

    def release(self, request_id: str) -> None:
        self.drop_routed(request_id)
        if self.client is not None:
            self.client.release(request_id)

    def abort(self, request_id: str) -> None:
        self.drop_routed(request_id)
        if self.client is not None:
            self.client.abort(request_id)

    def _submitted(self, request_id: str) -> None:
        if (routed := self._routed.get(request_id)) is not None:
            routed.since_step = self._num_steps

    def apply_step(self, step: StepMessage) -> bool:
        """Applies a step's load and drops the routed work that it includes. False if only the step's number changed, or
        counts of tokens and drafts."""
        num_routed = len(self._routed)
        if num_routed:
            for update in step.updates:
                self._routed.pop(update.request_id, None)
        if step.load is None:
            return self._has_changed(num_routed != len(self._routed))
        if self._tokens_before is None:
            self._tokens_before = step.load.num_prompt_tokens, step.load.num_output_tokens
        counts = {name: getattr(self.load, name) for name in COUNTS}
        changed = replace(step.load, **counts) != self.load
        self._num_steps += step.load.step != self.load.step
        self.load = step.load
        shown = [
            request_id
            for request_id, routed in self._routed.items()
            if routed.since_step is not None and self._num_steps >= routed.since_step + STEPS_TO_SHOW
        ]
        for request_id in shown:
            del self._routed[request_id]
        return self._has_changed(changed or num_routed != len(self._routed))

    def _has_changed(self, changed: bool) -> bool:
        if changed:
            self.changed()
        return changed

    # ------------------------------------------------------------------------------------------------------------------

    def load_row(self) -> LoadRow:
        load, routed = self.load, self._routed.values()
        return LoadRow(
            load.num_running + load.num_waiting + load.num_tickets + len(routed),
            load.num_waiting + sum(work.num_tokens > 0 for work in routed),
            load.queued_prefill_tokens + sum(work.num_tokens for work in routed),
            max(0, load.num_free_blocks - sum(work.num_blocks for work in routed)),
            load.num_blocks,
            load.prefill_tokens_per_s,
            load.decode_step_s,
        )

    def status(self, num_cached_blocks: int, num_host_blocks: int, successor: str = "") -> WorkerStatus:
        return WorkerStatus(
            worker_id=self.worker_id,
            address=self.address,
            state=self.state,
            reason="; ".join(filter(None, (self.reason, successor))),
            info=_without_key(self.info),
            load=self.load,
            num_routed=len(self._routed),
            num_cached_blocks=num_cached_blocks,
            num_host_blocks=num_host_blocks,
            tokens_before=self._tokens_before or (0, 0),
        )


def _without_key(info: WorkerInfo | None) -> WorkerInfo | None:
    return info and replace(info, lane=replace(info.lane, key=""))
