"""KV of a request that has gone: what has not left stays here, what has is counted, and nobody waits behind it."""

from __future__ import annotations

from typing import Any

import pytest

from kvtransfer.transport import Chunk, Sent
from tests.unit.decode_pool.pair import BLOCK_BYTES, Pair, expected, prompt


def test_kv_of_a_request_that_has_gone_makes_room_on_its_lane() -> None:
    pair = Pair(chunk_blocks=1, staged_blocks=3)
    pair.post.holding = True
    pair.start("gone", prompt(12))
    pair.step(4)
    assert pair.post.num_carried == 3
    pair.decode.engine.abort(["gone"])
    assert pair.prefill.engine.abort(["gone"]) == 1
    ticket = pair.start("next", prompt(12, seed=2))
    pair.step(4)
    assert pair.post.num_carried == 6, "what nobody wants is in the way"
    pair.answer("next", prompt(12, seed=2), ticket)
    pair.finish()
    assert pair.text("next") == expected(prompt(12, seed=2))
    assert pair.prefill.engine.load().transfer_bytes == 3 * BLOCK_BYTES


def test_blocks_sent_before_an_abort_are_counted() -> None:
    """A gateway ends a request here once the other worker has answered."""
    pair = Pair(chunk_blocks=1)
    pair.post.holding = True
    pair.start("r", prompt(12))
    pair.step(4)
    pair.post.deliver()
    pair.prefill.engine.abort(["r"])
    pair.decode.engine.abort(["r"])
    pair.finish()
    assert pair.prefill.engine.load().transfer_bytes == 3 * BLOCK_BYTES


def test_blocks_in_transit_at_an_abort_do_not_slow_the_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Routing divides the bytes by the seconds: neither counts, or both do."""
    pair = Pair(chunk_blocks=1)
    pair.post.holding = True
    ticket = pair.start("r", prompt(12))
    pair.step(4)
    pair.prefill.engine.abort(["r"])
    pair.decode.engine.abort(["r"])
    chunk = Chunk(ticket_id=ticket.ticket_id, generation=ticket.generation, first_block=0, num_blocks=1)
    pair.step(1)
    late = [[Sent(chunk=chunk, num_bytes=BLOCK_BYTES, elapsed_s=0.5)]]
    role: Any = pair.prefill.scheduler.role
    monkeypatch.setattr(role.outgoing._transfers, "poll_sent", lambda: late.pop() if late else [])
    pair.step(1)
    assert not late
    pair.finish()
    load = pair.prefill.engine.load()
    assert (load.transfer_bytes, load.transfer_s) == (0, 0.0)
