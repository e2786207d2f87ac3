"""Lanes inside one process tell how long they were busy, as those with wires do: routing goes by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvtransfer.transport import Arrived, Chunk, Sent
from kvtransfer.transports.inproc import InprocExchange, InprocParcel
from protos.values import KVLayout, LaneAddress, Ticket

LAYOUT = KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
SOURCE, DESTINATION = (LaneAddress(worker_id=name, incarnation=1, host=name, port=1) for name in ("p0", "d0"))


def test_a_lane_is_busy_with_one_parcel_after_the_other() -> None:
    now, deliveries = 0.0, deque[Callable[[], None]]()

    def carry(parcel: InprocParcel, deliver: Callable[[], None]) -> None:
        deliveries.append(deliver)

    exchange = InprocExchange(carry, clock=lambda: now)
    sender, receiver = exchange.sender(SOURCE, LAYOUT), exchange.receiver(DESTINATION, LAYOUT)
    ticket = Ticket(
        ticket_id="r1",
        generation=1,
        lease_s=60.0,
        block_ids=(1, 2, 3),
        num_cached_tokens=0,
        layout=LAYOUT,
        destination=DESTINATION,
    )

    def offer(block: int) -> None:
        chunk = Chunk(ticket_id="r1", generation=1, first_block=block, num_blocks=1)
        sender.offer(ticket, chunk, memoryview(bytes(128)))

    def deliver_at(when: float) -> None:
        nonlocal now
        now = when
        deliveries.popleft()()

    offer(0)
    offer(1)
    assert [lane.busy_s for lane in sender.lanes()] == [0.0]
    deliver_at(1.0)
    deliver_at(3.0)
    now = 10.0
    offer(2)
    deliver_at(10.5)
    assert [event.elapsed_s for event in sender.poll() if isinstance(event, Sent)] == [1.0, 2.0, 0.5]
    assert [event.elapsed_s for event in receiver.poll() if isinstance(event, Arrived)] == [1.0, 2.0, 0.5]
    assert [(lane.num_bytes, lane.busy_s) for lane in (*sender.lanes(), *receiver.lanes())] == [(384, 3.5)] * 2
