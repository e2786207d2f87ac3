"""The invariants find bugs that are planted in production code, and name them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.simulate.latency.rough import Rough
from cluster.simulate.node.device import Device
from cluster.simulate.run import soak_trial
from cluster.simulate.run.simulation_config import simulated_router
from cluster.supervision import lifecycle
from kvtransfer.events import EventCursor, EventLog, Gap
from kvtransfer.push_session import Session
from kvtransfer.reshard import Cut
from kvtransfer.ticket_ledger import Ledger
from kvtransfer.transport import LaneLost, peer_name
from protos.errors import BatonError
from protos.values import BlockRemoved, Cleared, Hello, KVEvent, KVEvents
from router.admission.admission import Admission, Turn
from router.admission.fair_queue import Entry, FairQueue, TenantQueue
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.poison_requests import PoisonRequests
from router.fleet.member import Member
from router.prefix.feed import Feed
from router.router_config import AdmissionConfig
from tests.unit.cluster.simulate.towns import run, town
from workers.engine.engine import Engine
from workers.kv.block_pool import BlockPool
from workers.rpc.worker_servicer import GatewayStream, WorkerServicer
from workers.scheduling.request import Request, State
from workers.scheduling.scheduler import Scheduler
from workers.transfer.receive import Incoming
from workers.transfer.send import Outgoing


def broken(*faults: str, workload: str = "poisson", **more: Any) -> str:
    with pytest.raises((AssertionError, BaseExceptionGroup)) as failed:
        run(*faults, workload=workload, **more)
    assert soak_trial.is_broken_invariant(failed.value)
    return soak_trial.reason(failed.value)


def test_kv_that_never_came_shows_as_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(device: Device, cut: Cut, payload: object) -> None: ...

    monkeypatch.setattr(Device, "write", forget)
    assert "it must be" in broken()


def test_a_block_that_leaks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda pool, block_ids: release(pool, block_ids[1:]))
    assert "references" in broken() or "held" in broken()


def test_a_block_that_is_freed_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a pool that counts one holder of a block and ignores who releases it."""
    acquire, release = BlockPool.acquire, BlockPool.release

    def acquire_once(pool: BlockPool, block_ids: Iterable[int]) -> None:
        acquire(pool, [block_id for block_id in block_ids if not pool.num_references(block_id)])

    def release_held(pool: BlockPool, block_ids: Sequence[int]) -> None:
        release(pool, [block_id for block_id in block_ids if pool.num_references(block_id)])

    monkeypatch.setattr(BlockPool, "acquire", acquire_once)
    monkeypatch.setattr(BlockPool, "release", release_held)
    assert "their holders know of" in broken(workload="agents", prefill=0, decode=1)


def having(what: str, seed: int, owner: type[Any], name: str, *, matters: Callable[..., object] | None = None) -> int:
    """Returns a soak's seed after a check that its sound cluster reaches the situation in which the planted bug
    matters: a call that `matters`, or whose result is true."""
    sound, num_times = getattr(owner, name), 0

    def watched(*arguments: Any) -> Any:
        nonlocal num_times
        did = matters is not None and bool(matters(*arguments))
        result = sound(*arguments)
        num_times += bool(result) if matters is None else did
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, watched)
        soak_trial.run(soak_trial.trial(seed))
    assert num_times, f"seed {seed} of the soak no longer has {what}: give one that has"
    return seed


def broken_trial(seed: int, **more: Any) -> str:
    made = soak_trial.trial(seed)
    try:
        soak_trial.run(replace(made, config=replace(made.config, **more)))
    except (AssertionError, BaseExceptionGroup) as error:
        failure = error
    else:
        pytest.fail(
            f"--replay {made.seed}: what is broken here is not found: mend what looks for it, or give another seed"
        )
    assert soak_trial.is_broken_invariant(failure)
    return soak_trial.reason(failure)


def test_a_seed_without_its_situation_is_reported() -> None:
    with pytest.raises(AssertionError, match="seed 0 of the soak no longer has three moons: give one that has"):
        having("three moons", 0, Member, "drop_routed", matters=lambda member, name: False)


def test_a_block_freed_while_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = having("somebody who leaves while a step writes", 41, Scheduler, "_last_step_of")
    monkeypatch.setattr(Scheduler, "_last_step_of", lambda scheduler, request: None)
    assert "a step in flight writes them" in broken_trial(seed)


def test_a_block_that_gateways_are_not_told_has_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    record = EventLog.record
    monkeypatch.setattr(
        EventLog, "record", lambda log, event: None if isinstance(event, BlockRemoved) else record(log, event)
    )
    assert "does not have any more" in broken(num_blocks=60)


def test_a_line_that_grows_without_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "_bound", lambda admission, entry: None)
    router = simulated_router(admission=AdmissionConfig(max_queued=1, max_backlog=1))
    spec = replace(town().spec, latency=Rough())
    assert "wait in line" in broken(prefill=0, decode=1, router=router, spec=spec)


def narrow(**more: Any) -> dict[str, Any]:
    """A colocated worker on which two run, and one waits."""
    spec = town().spec
    scheduler = replace(spec.scheduler, max_waiting=1, max_num_seqs=2)
    return {"prefill": 0, "decode": 1, "spec": replace(spec, scheduler=scheduler), **more}


def test_more_that_wait_on_a_worker_than_may_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_check_room", lambda engine: None)
    assert "wait on decode-0, 1 may" in broken(**narrow())


def test_a_request_starved_of_room_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Dispatcher._wait_for_room

    async def wait_and_count_on(dispatcher: Dispatcher, *arguments: Any) -> None:
        await wait(dispatcher, *arguments)
        dispatcher._fleet.offers.num_turned_away += 1

    monkeypatch.setattr(Dispatcher, "_wait_for_room", wait_and_count_on)
    assert "believes that somebody waits for room" in broken(**narrow())


def test_somebody_in_line_who_has_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look_away(admission: Admission) -> None: ...

    monkeypatch.setattr(Admission, "_watch", look_away)
    monkeypatch.setattr(FairQueue, "remove", lambda line, entry: None)
    assert "are in line who have gone" in broken(
        **narrow(router=simulated_router(admission=AdmissionConfig(max_queue_s=5.0)))
    )


def test_work_that_counts_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = having("work that was routed", 0, Member, "drop_routed", matters=lambda member, name: name in member._routed)
    monkeypatch.setattr(Member, "drop_routed", lambda member, name: None)
    assert "on their way to" in broken_trial(seed)


def test_a_starved_request_is_found_without_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Incoming, "adopted", lambda incoming, request, ticket: False)
    assert "has heard nothing for" in broken(audit_every=0, patience_s=50.0)


def test_a_worker_that_does_not_come_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "delay_s", lambda num_failures, config: 1e5)
    assert "was not started again" in broken("0.5 kill decode-0")


def test_a_prompt_that_is_held_for_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forget = Outgoing.drop

    def keep(outgoing: Outgoing, request: Request) -> None:
        forget(outgoing, request)
        if request.state is State.HELD:
            outgoing._released.clear()

    seed = having("a held prompt that ends", 57, Outgoing, "drop", matters=lambda _, one: one.state is State.HELD)
    monkeypatch.setattr(Outgoing, "drop", keep)
    assert "and no gateway counts on it" in broken_trial(seed)
    assert "what did it hold?" in broken_trial(seed, audit_every=0)


def test_an_error_that_nothing_explains_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def give_up(dispatcher: Dispatcher, error: BatonError, *_: object) -> None:
        raise error

    seed = having("an attempt that fails", 7, Dispatcher, "_recover")
    monkeypatch.setattr(Dispatcher, "_recover", give_up)
    assert "nothing that happens here is a reason for it" in broken_trial(seed)


def test_a_lease_that_never_ends_is_found_at_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = having("a lease that ends at the receiver", 20, Ledger, "expire")
    monkeypatch.setattr(Ledger, "expire", lambda ledger, now: ())
    assert "after its lease" in broken_trial(seed)


def test_a_lease_that_never_ends_is_found_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = having("a lease that ends at the sender", 281, Session, "expired")
    monkeypatch.setattr(Session, "expired", lambda session, now: False)
    assert "after its lease" in broken_trial(seed)


def test_a_ticket_of_a_lost_lane_is_found_at_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = having("KV that is awaited from a lost lane", 7, Ledger, "abort_source")
    monkeypatch.setattr(Ledger, "abort_source", lambda *_: ())
    assert "was lost" in broken_trial(seed)


def test_a_ticket_of_a_lost_lane_is_found_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    def pushes(outgoing: Outgoing, event: LaneLost) -> bool:
        return any(peer_name(push.session.ticket.destination) == event.peer for push in outgoing._pushes.values())

    seed = having("KV on its way over a lost lane", 73, Outgoing, "_lost", matters=pushes)
    monkeypatch.setattr(Outgoing, "_lost", lambda outgoing, event: None)
    assert "was lost" in broken_trial(seed)


def test_an_unreleased_reservation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease ends some time, and hid it."""
    seed = having("a reservation that its gateway gives up", 0, Incoming, "withdraw")
    monkeypatch.setattr(Incoming, "withdraw", lambda incoming, request_id: False)
    assert "has its ticket still" in broken_trial(seed)


def test_kv_on_its_way_to_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = having("KV on its way to somebody who has gone", 33, Outgoing, "withdraw")
    monkeypatch.setattr(Outgoing, "withdraw", lambda outgoing, ticket_id: False)
    assert "its KV is on its way still" in broken_trial(seed)


def test_leftovers_of_a_lost_gateway_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(servicer: WorkerServicer, stream: GatewayStream) -> None:
        servicer._streams.pop(stream, None)
        for request_id in tuple(stream.request_ids):
            servicer._disown(request_id)

    seed = having("a gateway that goes", 8, WorkerServicer, "_end", matters=lambda _, stream: stream.request_ids)
    monkeypatch.setattr(WorkerServicer, "_end", end)
    assert "and no gateway counts on it" in broken_trial(seed)


def test_a_deadlock_over_blocks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def ties(scheduler: Scheduler) -> bool:
        runs = scheduler._running or scheduler._in_flight or len(scheduler.onloads)
        return not runs and sum(bool(request.adopted) for request in scheduler._waiting) > 1

    seed = having("answers that wait for each other", 180, Scheduler, "_take_back_blocks", matters=ties)
    monkeypatch.setattr(Scheduler, "_take_back_blocks", lambda scheduler: None)
    assert "no step finished for 11 s, and nothing held it up" in broken_trial(seed)


def test_a_trial_that_never_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = having("a trial", 23, PoisonRequests, "drop", matters=lambda _, suspicion: suspicion.batch is not None)
    monkeypatch.setattr(PoisonRequests, "drop", lambda *_: None)
    assert "jobs are still tried" in broken_trial(seed)


def test_places_kept_for_ended_requests_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept(dict[int, Turn]):
        def pop(self, number: int, *_: object) -> Turn | None:  # type: ignore[override]
            return self.get(number)

    make = Admission.__init__

    def make_and_keep(admission: Admission, *arguments: Any, **more: Any) -> None:
        make(admission, *arguments, **more)
        admission._turns = Kept()

    monkeypatch.setattr(Admission, "__init__", make_and_keep)
    assert "turns are kept of" in broken(**narrow())


def test_tokens_counted_for_ended_requests_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = TenantQueue.remove

    def remove_and_count_on(row: TenantQueue, entry: Entry) -> bool:
        num_tokens, removed = row.num_tokens, remove(row, entry)
        row.num_tokens = num_tokens
        return removed

    seed = having(
        "a line that somebody leaves to others", 3, TenantQueue, "remove", matters=lambda row, _: row.entries[1:]
    )
    monkeypatch.setattr(TenantQueue, "remove", remove_and_count_on)
    assert "wait in it" in broken_trial(seed)


def test_state_kept_from_a_former_life_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = EventCursor.accept

    def add(cursor: EventCursor, message: KVEvents) -> tuple[KVEvent, ...] | Gap:
        news = accept(cursor, message)
        if isinstance(news, Gap) or message.snapshot:
            return news
        return tuple(event for event in news if not isinstance(event, Cleared))

    def greet(feed: Feed, worker_id: str, incarnation: int) -> Hello:
        cursor = feed._cursors.setdefault(worker_id, EventCursor())
        return Hello(gateway_id=feed.gateway_id, incarnation=cursor.incarnation, next_seq=cursor.next_seq)

    def knows(feed: Feed, worker_id: str, incarnation: int) -> bool:
        cursor = feed._cursors.get(worker_id)
        return cursor is not None and cursor.incarnation < incarnation and feed.index.num_blocks(worker_id) > 0

    seed = having("a new life of whom much is known", 237, Feed, "hello", matters=knows)
    monkeypatch.setattr(EventCursor, "accept", add)
    monkeypatch.setattr(Feed, "hello", greet)
    assert "does not have any more" in broken_trial(seed)
