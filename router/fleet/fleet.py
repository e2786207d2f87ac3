"""The workers of the router: it connects to them, watches them, offers them to policies, and reconnects after a loss.

    join(address) ─▶ describe ─▶ compatible? ─▶ healthy? ─▶ stream: Hello ─▶ first load: READY
                        ▲                                                       │
                        └─────────── pause, doubling ◀── stream lost, no progress, ...

The fleet does not discover workers: the cluster calls `add_worker` and `remove_worker`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from protos.errors import BatonError, IncompatibleWorkers, NotFound, WorkerLost
from protos.event_loop import OwnPauses, loop_time
from protos.values import Adapter, Profile, StepMessage, WorkerInfo, WorkerStats
from protos.wire import PROTOBUF, ChannelEncoding
from router.fleet.channels import OpenChannel, open_channel
from router.fleet.fleet_adapters import FleetAdapters
from router.fleet.fleet_revisions import FleetRevisions, RevisedWorker, check_joins
from router.fleet.member import Member, WorkerState, WorkerStatus
from router.fleet.offers import FleetOffers
from router.fleet.pool_totals import LoadCounts, LoadTotals
from router.fleet.sleep import FleetSleep
from router.fleet.successors import Successor, Successors
from router.fleet.worker_client import WorkerClient
from router.jobs import AdapterReport
from router.prefix.feed import Feed
from router.router_config import RouterConfig

log = logging.getLogger("baton.router")

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
STATE_LINE = "worker %s at %s is %s%s"


class Fleet:
    """The router's workers, on one event loop. `num_faults` counts sessions that ended with an
    internal error."""

    def __init__(
        self,
        *,
        feed: Feed,
        config: RouterConfig,
        open_channel: OpenChannel = open_channel,
        encoding: ChannelEncoding = PROTOBUF,
    ) -> None:
        self.feed = feed
        self._config = config
        self._open_channel = open_channel
        self._encoding = encoding
        self._members: dict[str, Member] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self.own_pauses = OwnPauses()
        self.successors = Successors()
        self.sleep = FleetSleep()
        self._load_totals = LoadTotals()
        self.num_faults = 0
        self.notices: list[Callable[[], str]] = []  # more faults for `degraded`
        self._stored_as: dict[str, str] = {}  # by revision
        self.lora = FleetAdapters()
        self.revisions = FleetRevisions()
        self.offers = FleetOffers(self._members, feed, revisions=self.revisions, lora=self.lora)
        self._behind = ""  # the fault of the cluster behind the workers

    # -- workers -------------------------------------------------------------------------------------------------------

    def starting(self, worker_id: str, successor: Successor | None) -> None:
        if self.successors.starting(worker_id, successor):
            self.offers.changed.notify()

    def add_worker(self, address: str, *, worker_id: str) -> None:
        member = self._members.get(worker_id)
        if member is None or member.address != address or member.state is not WorkerState.READY:
            self.successors.joined(worker_id)
        else:
            self.successors.arrived(worker_id)
        if member is None:
            self.own_pauses.watch()
            member = self._members[worker_id] = Member(worker_id, address)
            self.offers.table.add(member)
            self._keepers[worker_id] = asyncio.create_task(self._keep(member), name=f"keep {worker_id}")
        elif member.address != address:
            member.address = address
            if member.client is not None:
                member.client.lose(WorkerLost(f"worker {worker_id} has moved to {address}"))
        member.reconnect.set()

    async def remove_worker(self, worker_id: str) -> None:
        """Removes a worker. Its requests fail with WorkerLost and resume on other workers. Ignores an unknown one."""
        self.successors.arrived(worker_id)
        if worker_id not in self._members:
            return
        member = self._members.pop(worker_id)
        member.state = WorkerState.LOST
        self._load_totals.credit(member)
        self.offers.table.remove(member)
        self._note_workers()
        self.feed.drop(worker_id)
        self.offers.predictor.drop(worker_id)
        self.offers.changed.notify()
        keeper = self._keepers.pop(worker_id)
        keeper.cancel()
        await asyncio.wait([keeper])

    async def close(self) -> None:
        self.own_pauses.close()
        for worker_id in tuple(self._members):
            await self.remove_worker(worker_id)

    # -- the fleet as others see it ------------------------------------------------------------------------------------

    def stored_as(self, revision: str) -> str:
        """Encodings and types of weights and KV on workers of a revision; without a worker, the last known ones."""
        return self._stored_as.get(revision, "")

    def member(self, worker_id: str) -> Member:
        if worker_id not in self._members:
            raise WorkerLost(f"worker {worker_id} has left")
        return self._members[worker_id]

    def named(self, worker_id: str, *, param: str | None = None) -> Member:
        if worker_id not in self._members:
            fleet = ", ".join(self._members) or "empty"
            raise NotFound(f"there is no worker {worker_id}: the fleet is {fleet}", param=param)
        return self._members[worker_id]

    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters by name; without a worker, the last known ones. Of different files under one name, the
        files of most workers."""
        return self.lora.by_name

    async def load_adapter(self, name: str, path: str) -> AdapterReport:
        return await self.lora.load(name, path, self._clients())

    async def unload_adapter(self, name: str) -> AdapterReport:
        return await self.lora.unload(name, self._clients())

    def _clients(self) -> dict[str, WorkerClient]:
        return {member.worker_id: member.client for member in self._members.values() if member.client is not None}

    def revision(self) -> str:
        if self.revisions.count > 1:
            self._revise()
        return self.revisions.begin()

    def _revise(self) -> None:
        states = ((member.info, member.takes_work, member.load.retiring) for member in self._members.values())
        self.revisions.update(RevisedWorker(info, *state) for info, *state in states if info is not None)

    def _note_workers(self) -> None:
        self._revise()
        self._stored_as |= _stored_as(self._here())
        self.lora.update(self._here())

    def ready(self) -> bool:
        return any(member.takes_work for member in self._members.values())

    def asleep(self) -> str:
        return self.sleep.describe(loop_time())

    def set_degraded(self, reason: str) -> None:
        self._behind = reason

    def degraded(self) -> str:
        shared = (self.feed.trouble, self.feed.warning)
        return "; ".join(filter(None, (self._behind, *shared, *(notice() for notice in self.notices))))

    def status(self) -> tuple[WorkerStatus, ...]:
        index = self.feed.index
        return tuple(
            member.status(
                index.num_blocks(member.worker_id),
                index.num_on_host(member.worker_id),
                successor=self.successors.reason(member.worker_id),
            )
            for member in self._members.values()
        )

    def load_totals(self) -> LoadCounts:
        for member in self._members.values():
            self._load_totals.credit(member)
        return self._load_totals.counts

    async def stats(self, worker_id: str) -> WorkerStats:
        return await self.member(worker_id).connection().stats()

    async def profile(self, worker_id: str, recording: bool | None = None) -> Profile:
        return await self.member(worker_id).connection().profile(recording)

    async def drain(self, worker_id: str) -> int:
        member = self.named(worker_id)
        drained = member.state is not WorkerState.READY
        try:
            return await member.connection().drain(exit=True)
        except WorkerLost as error:
            if not drained:
                raise
            raise WorkerLost(
                f"worker {worker_id} is already draining, or its successor is starting: `baton status` shows "
                "when it is ready"
            ) from error

    # -- connections ---------------------------------------------------------------------------------------------------

    async def _keep(self, member: Member) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            member.reconnect.clear()
            try:
                await self._session(member)
            except IncompatibleWorkers as error:
                self._enter(member, WorkerState.INCOMPATIBLE, error.message)
            except BatonError as error:
                if member.state in (WorkerState.READY, WorkerState.DRAINING):
                    pause_s = FIRST_PAUSE_S
                state = WorkerState.LOST
                if member.role is not None and member.state is WorkerState.READY:  # a draining one is expected to end
                    state = WorkerState.JOINING if self.own_pauses.is_recent() else WorkerState.LOST
                    self.offers.totals[member.role].num_losses += state is WorkerState.LOST
                self._enter(member, state, error.message)
            except Exception as error:  # one worker's invalid messages must not end the sessions of others
                log.exception("worker %s: its session failed: internal error", member.worker_id, extra=_of(member))
                self.num_faults += 1
                self._enter(member, WorkerState.LOST, f"{type(error).__name__}: {error}")
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await member.reconnect.wait()
            pause_s = FIRST_PAUSE_S if member.reconnect.is_set() else min(2 * pause_s, MAX_PAUSE_S)

    async def _session(self, member: Member) -> None:
        config = self._config
        client = WorkerClient(
            member.address,
            connect_timeout_s=config.fleet.connect_timeout_s,
            control_timeout_s=config.fleet.control_timeout_s,
            open_channel=self._open_channel,
            encoding=self._encoding,
            on_loss=member.changed,
        )
        watch: asyncio.Task[None] | None = None
        adapting: asyncio.Task[None] | None = None
        try:
            info = await client.describe()
            await _check(client, member.worker_id)
            self._admit(member, info)
            await self.revisions.learn(info)
            hello = self.feed.hello(member.worker_id, info.incarnation)
            watch = asyncio.create_task(self._watch(member, client))
            adapting = asyncio.create_task(self.lora.catch_up(info, client))
            self._load_totals.credit(member)
            member.connected(info, client)  # no other task runs from here to the first statement of `run`
            self._note_workers()
            await client.run(hello, lambda step: self._receive(member, client, step))
        finally:
            member.disconnected()
            self.feed.lost(member.worker_id)
            for task in (watch, adapting):
                if task is not None:
                    task.cancel()
            await client.close()

    def _admit(self, member: Member, info: WorkerInfo) -> None:
        if info.worker_id != member.worker_id:
            raise IncompatibleWorkers(
                f"{member.address} answers as {info.worker_id}, not as {member.worker_id}: "
                "stop the worker that has taken its port"
            )
        check_joins(info, tuple(self._here(besides=member)))
        reference = self.offers.reference(besides=member)
        if reference is not None and info.layout.block_size != reference.layout.block_size:
            log.info(
                "worker %s has blocks of %d tokens, %s of %d: prompts are hashed in both",
                info.worker_id, info.layout.block_size, reference.worker_id, reference.layout.block_size,
            )  # fmt: skip

    def _here(self, besides: Member | None = None) -> Iterator[WorkerInfo]:
        members = self._members.values()
        return (m.info for m in members if m.info is not None and m.client is not None and m is not besides)

    def _receive(self, member: Member, client: WorkerClient, step: StepMessage) -> None:
        for events in step.events:
            if (hello := self.feed.receive(member.worker_id, events)) is not None:
                missing = "worker %s: events are missing: requesting them from %d on"
                log.info(missing, member.worker_id, hello.next_seq, extra=_of(member))
                client.send_hello(hello)
        if step.role is not None and step.role is not member.role:
            self._load_totals.credit(member)
        if step.role is not None and member.changed_role(step.role):
            log.info("worker %s is a %s worker from now on", member.worker_id, step.role, extra=_of(member))
        if step.adapters is not None:
            had = member.info.adapters if member.info is not None else ()
            if member.changed_adapters(step.adapters.adapters):
                self.lora.learn(had, step.adapters.adapters)
                self.lora.update(self._here())
                self.offers.changed.notify()
        if not member.apply_step(step) and member.state in (WorkerState.READY, WorkerState.DRAINING):
            return  # too small a change to alter a decision
        if step.load is None:
            return
        self._enter(member, WorkerState.DRAINING if step.load.draining else WorkerState.READY)
        self.offers.changed.notify()

    async def _watch(self, member: Member, client: WorkerClient) -> None:
        while True:
            await asyncio.sleep(self._config.fleet.health_period_s)
            try:
                await _check(client, member.worker_id)
            except BatonError as error:
                if not self.own_pauses.is_recent():
                    client.lose(WorkerLost(error.message))
                    return

    def _enter(self, member: Member, state: WorkerState, reason: str = "") -> None:
        was = member.state
        if not member.enter(state, reason, now=loop_time()):
            return
        self._revise()
        if state in (WorkerState.READY, WorkerState.INCOMPATIBLE):
            self.successors.arrived(member.worker_id)
        if member.state is WorkerState.DRAINED:
            log.info("worker %s at %s has drained and ended", member.worker_id, member.address, extra=_of(member))
        elif not was is state is WorkerState.LOST:  # a worker that stays lost is not logged again
            log.log(
                logging.INFO if state in (WorkerState.READY, WorkerState.DRAINING) else logging.WARNING,
                STATE_LINE, member.worker_id, member.address, state, f": {reason}" if reason else "",
                extra=_of(member),
            )  # fmt: skip
        self.offers.changed.notify()


async def _check(client: WorkerClient, worker_id: str) -> None:
    health = await client.health()
    if not health.healthy:
        raise WorkerLost(f"worker {worker_id} makes no progress: {health.reason}")


def _of(member: Member) -> dict[str, str]:
    return {"worker": member.worker_id}


def _stored_as(workers: Iterable[WorkerInfo]) -> dict[str, str]:
    """Encodings by revision, sorted."""
    forms: dict[str, set[str]] = {}
    for info in workers:
        types = "/".join(sorted({part.dtype for part in info.layout.parts}))
        forms.setdefault(info.revision, set()).add(f"{info.weights}; KV {types}")
    return {revision: ", ".join(sorted(names)) for revision, names in forms.items()}
