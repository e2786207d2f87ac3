"""One simulated worker: the real engine, role and service; its device, lanes and network are models."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cluster.simulate.latency.step_work import Latency, WindowShares
from cluster.simulate.node.device import WEIGHT, Device
from cluster.simulate.node.engine_loop import SimulatedEngineLoop
from cluster.simulate.node.host_tier import HostMemory
from cluster.simulate.node.itl import Gaps
from cluster.simulate.node.simulated_drafts import SimulatedDrafter
from cluster.simulate.node.watched_parts import TicketWatch, WatchedEngine, WatchedPool
from cluster.simulate.world.network import VALUES, Network, Port
from cluster.simulate.world.simulated_lanes import Lanes
from cluster.supervision.rank import next_roles
from decode_pool.decode_role import DecodeRole
from kvtransfer.events import EventLog
from kvtransfer.ticket_ledger import TicketState
from kvtransfer.transports.inproc import InprocSender
from prefill_pool.prefill_role import PrefillRole
from protos.errors import WorkerDraining
from protos.listening import netloc
from protos.values import KVLayout, LaneAddress, WorkerInfo, WorkerRole, WorkerStats
from workers.engine.engine import Engine
from workers.kv.block_pool import BlockPool
from workers.kv.host import HostPool
from workers.rpc.role_change import RoleChange
from workers.rpc.worker_servicer import WorkerServicer
from workers.scheduling.scheduler import Scheduler
from workers.speculation.speculation import Speculation
from workers.transfer.rank_transfer import RankTransfer
from workers.transfer.receive import reservations
from workers.transfer.transfer_leader import TransferLeader
from workers.worker_config import SchedulerConfig, TransferConfig

LEAVE_LOOK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Settings of all workers. `depth` is the engine's. A gateway that missed more than `kept_events` gets a snapshot.
    `shares`: windows of layers that step times depend on. With a `drafter` there are no leaps."""

    model: str
    layout: KVLayout
    num_blocks: int
    scheduler: SchedulerConfig
    latency: Latency
    prefill: TransferConfig
    decode: TransferConfig
    depth: int = 1
    stall_s: float = 60.0
    leaping: bool = False
    thorough: bool = False
    kept_events: int = 4096
    host_blocks: int = 0
    host_bytes_per_s: float = 25e9
    shares: WindowShares = ()
    drafter: SimulatedDrafter | None = None

    @property
    def num_pages(self) -> int:
        return self.num_blocks * len(self.layout.groups)


class SimulatedWorker:
    """One life of a worker, from `start` to `kill`."""

    def __init__(
        self,
        spec: Spec,
        *,
        worker_id: str,
        role: WorkerRole,
        incarnation: int,
        network: Network,
        lanes: Lanes,
        skew_s: float = 0.0,
        gaps: Gaps | None = None,
        withholds: bool = False,
        seed: int = 0,
    ) -> None:
        self.worker_id = worker_id
        self._spec = spec
        self._network = network
        self._loop = asyncio.get_running_loop()
        self._skew_s = skew_s
        self._lane = LaneAddress(worker_id=worker_id, incarnation=incarnation, host=worker_id, port=incarnation)
        self.info = self._make_info(role)
        self.device = Device(
            spec.latency,
            layout=spec.layout,
            num_pages=spec.num_pages,
            shares=spec.shares,
            vocab_size=spec.scheduler.vocab_size,
            thorough=spec.thorough,
            host_s=spec.drafter.host_s if spec.drafter is not None else 0.0,
        )
        self.log = EventLog(incarnation, spec.kept_events)
        pool = self._make_pool()
        sender = lanes.exchange.sender(self._lane, spec.layout, wake=self._ring)
        receiver = lanes.exchange.receiver(self._lane, spec.layout, wake=self._ring)
        self._transfers = TransferLeader(RankTransfer(self.device, spec.layout, sender=sender, receiver=receiver))
        self.role: PrefillRole | DecodeRole = self._make_role(pool)
        self._tickets = TicketWatch(self.role, sender, receiver)
        speculation = self._make_speculation(f"{seed}")
        scheduler = Scheduler(spec.scheduler, pool, self.role, speculation=speculation)
        self.engine = self._make_engine(scheduler, sender)
        self.servicer = self._make_servicer()
        self.turns = self._make_turns(skew_s, gaps, withholds)
        self.servicer.attach(self.turns)
        roles = {} if role is WorkerRole.COLOCATED else next_roles(self.engine, spec.prefill, spec.decode)
        self._role_change = RoleChange(
            role, roles, engine=self.engine, loop=self.turns, servicer=self.servicer,
            idle=self._idle, changed=self._note_role,
        )  # fmt: skip
        self._num_changes = 0
        self._changes_turn = 0  # when tickets last arrived or ended
        self.port: Port | None = None
        self.has_left = False  # after a drain with exit
        self._was_held_up = False  # frozen, or slowed
        self._leaving: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def clock(self) -> float:
        """The host's own clock."""
        return self._loop.time() + self._skew_s

    @property
    def alive(self) -> bool:
        return self.port is not None and not self.port.closed

    @property
    def frozen(self) -> bool:
        return self.port is not None and self.port.frozen

    @property
    def busy(self) -> bool:
        return self.frozen or self.engine.has_work()

    @property
    def held_up(self) -> bool:
        """Whether a source or a lane may hold up its KV."""
        waits = any(ticket.state != TicketState.ARRIVED for ticket in self.role.ledger.stats(0.0))
        return self._was_held_up or waits

    def start(self) -> WorkerInfo:
        self.port = self._network.listen(self.info.address, self.servicer)
        return self.info

    def kill(self) -> None:
        """The process ends without clean-up; its peers see closed connections."""
        if self.port is None or self.port.closed:
            return
        if self._leaving is not None and self._leaving is not asyncio.current_task():
            self._leaving.cancel()
        self._role_change.cancel()
        self.turns.stop()
        self.port.close()
        self._loop.call_later(0.02, self._transfers.close)
        if not self.ended.done():
            self.ended.set_result(None)

    def _leave_soon(self) -> None:
        if self._leaving is None:
            self._role_change.cancel()
            self._leaving = self._loop.create_task(self._leave(), name=f"leaving of {self.worker_id}")

    async def _leave(self) -> None:
        """Ends the worker as `workers.rpc.worker.Worker.leave` does."""
        await self.turns.call(self.engine.drain)
        await self._idle()
        await self.servicer.disowned()
        self.has_left = True
        self.kill()

    async def _idle(self) -> None:
        while self.alive and self.busy:  # noqa: ASYNC110 - there is no event for it while frozen
            await asyncio.sleep(LEAVE_LOOK_S)

    def _order_role(self, role: WorkerRole | None) -> None:
        """Raises WorkerDraining, InvalidRequest."""
        if role is not None and self._leaving is not None:
            raise WorkerDraining(f"worker {self.worker_id} is ending")
        if role is not None or self._leaving is None:
            self._role_change.order(role)

    def _note_role(self, role: WorkerRole) -> None:
        self.info, self.role = replace(self.info, role=role), self._present_role()

    def _present_role(self) -> PrefillRole | DecodeRole:
        role = self.engine.role
        assert isinstance(role, PrefillRole | DecodeRole)
        return role

    def freeze(self) -> None:
        """A signal stops the process; its sockets stay open."""
        assert self.port is not None
        self._was_held_up = True
        self.turns.freeze()
        self.port.freeze()

    def thaw(self) -> None:
        if self.port is not None and self.port.frozen:
            self.port.thaw()
            self.turns.thaw()

    def reset(self) -> None:
        assert self.port is not None
        self.port.reset()

    def spoil(self, change: Callable[[Any], Any] | None) -> None:
        assert self.port is not None
        self.port.change = change

    def slow(self, factor: float) -> None:
        self._was_held_up = True
        self.turns.flush()
        self.device.slowness = factor

    def jump(self, seconds: float) -> None:
        self.turns.flush()
        self._skew_s += seconds
        self.turns.skew_s += seconds
        self.turns.on_kv()

    def check_balance(self) -> None:
        """Checks the numbers of references, after every event."""
        ledger, shared, scheduler = (
            self.role.ledger.reserved_ids(),
            self.role.outgoing.shared_ids(),
            self.engine.scheduler,
        )
        num_held = sum(request.num_held for request in scheduler.requests()) + scheduler.num_leaving_blocks
        num_loading = sum(1 for _ in scheduler.onloads.held_ids())
        self.engine.pool.check_balance(len(ledger) + len(list(shared)) + num_held + num_loading)
        self._tickets.check(self.turns.ticked_s)

    def check(self) -> None:
        """Checks between two steps that every reference to a block belongs to a request, an onload or a ticket."""
        self.role.ledger.check_integrity()
        self.engine.check_integrity([*self.role.ledger.reserved_ids(), *self.role.outgoing.shared_ids()])
        if not self.turns.is_due:
            held = [
                *(request.request_id for request in self.engine.scheduler.requests()),
                *self.role.ledger.ticket_ids(),
            ]
            unowned = self.servicer.unowned(held)
            assert not unowned, f"{self.worker_id} holds {unowned[0]}, and no gateway counts on it"

    def assert_idle(self) -> None:
        self.role.ledger.assert_idle()
        self.engine.assert_idle()

    def _make_info(self, role: WorkerRole) -> WorkerInfo:
        spec, lane = self._spec, self._lane
        return WorkerInfo(
            worker_id=self.worker_id,
            incarnation=lane.incarnation,
            role=role,
            model=spec.model,
            address=netloc(lane.host, lane.port),
            layout=spec.layout,
            lane=lane,
            max_model_len=spec.scheduler.max_model_len,
            vocab_size=spec.scheduler.vocab_size,
            device="simulated",
            num_blocks=spec.num_blocks,
        )

    def _make_servicer(self) -> WorkerServicer:
        return WorkerServicer(
            info=self.info,
            engine=self.engine,
            clock=self.clock,
            stats=self._stats,
            reserve=reservations(self.role.incoming, self.engine),
            leave=self._leave_soon,
            change_role=self._order_role,
            encoding=VALUES,
        )

    def _make_turns(self, skew_s: float, gaps: Gaps | None, withholds: bool) -> SimulatedEngineLoop:
        return SimulatedEngineLoop(
            self.engine,
            self.device,
            publish=self.servicer.publish,
            move=self._move,
            advance_transfers=self._advance_transfers,
            stall_s=self._spec.stall_s,
            skew_s=skew_s,
            quiet_until=self._quiet_until if self._spec.leaping and self._spec.drafter is None else None,
            gaps=gaps,
            withholds=withholds,
            round_trip_s=2 * self._network.wire.delay_s,
        )

    def _make_pool(self) -> BlockPool:
        spec, log = self._spec, self.log
        limits: dict[str, Any] = {"host": self._make_host(log), "windows": spec.layout.windows}
        if not spec.thorough:
            return BlockPool(spec.num_pages, spec.layout.block_size, log.record, **limits)
        written_ids = lambda: self.engine.written_ids()  # noqa: E731
        return WatchedPool(spec.num_pages, spec.layout.block_size, log.record, **limits, written_ids=written_ids)

    def _make_engine(self, scheduler: Scheduler, sender: InprocSender) -> Engine:
        make = partial(WatchedEngine, sender=sender) if self._spec.thorough else Engine
        return make(scheduler, self.device, events=self.log, clock=self.device.clock, depth=self._spec.depth)

    def _make_speculation(self, key: str) -> Speculation | None:
        spec, device = self._spec, self.device
        if spec.drafter is None:
            return None
        vocab_size = spec.scheduler.vocab_size
        return spec.drafter.speculation(weight=WEIGHT, vocab_size=vocab_size, key=key, wait=device.wait)

    def _make_host(self, log: EventLog) -> HostPool | None:
        spec = self._spec
        if not spec.host_blocks:
            return None
        block_bytes, num_groups = spec.layout.stored_bytes, len(spec.layout.groups)
        memory = HostMemory(self.device, page_s=block_bytes / num_groups / spec.host_bytes_per_s)
        num_slots = spec.host_blocks * num_groups
        return HostPool(num_slots, memory, log.record, block_bytes=block_bytes, num_groups=num_groups)

    def _make_role(self, pool: BlockPool) -> PrefillRole | DecodeRole:
        spec = self._spec
        if self.info.role is WorkerRole.PREFILL:
            return PrefillRole(self._transfers, pool, spec.layout, spec.prefill)
        return DecodeRole(self._transfers, pool, spec.layout, spec.decode)

    def _quiet_until(self) -> float:
        """Returns the end of the first lease if the worker only waits for KV. Transfers need every turn, and so does
        the turn after a ticket's end, which publishes it."""
        role = self.role
        if role.outgoing.busy() or role.incoming.has_failures() or self._transfers.is_moving():  # lanes keep it busy
            return -math.inf
        num_changes = self.role.ledger.num_changes
        if num_changes != self._num_changes:
            self._num_changes, self._changes_turn = num_changes, self.turns.num_turns
        return -math.inf if self._changes_turn == self.turns.num_turns else self.role.ledger.next_deadline_s()

    def _move(self, now: float) -> bool:
        """Receives and sends KV. True if a request may begin or end as a result."""
        incoming = self.role.incoming
        before = incoming.num_settled
        incoming.receive(now)
        settled = incoming.num_settled != before
        if not self._transfers.is_sending():
            return settled
        return self.role.outgoing.send(now) or settled

    def _advance_transfers(self, now: float) -> None:
        if self.role.is_behind():
            self.role.advance_transfers(now, self.engine.num_in_flight)

    def _ring(self) -> None:
        self.turns.on_kv()

    def _stats(self) -> WorkerStats:
        return WorkerStats(
            info=self.info,
            load=self.engine.load(),
            tickets=tuple(self.role.tickets(self.clock())),
            lanes=tuple(self._transfers.lanes()),
        )
