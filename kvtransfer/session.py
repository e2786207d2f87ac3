"""One push, as its sender sees it: which blocks of a ticket are computed, offered, sent. Pure integers and time.

    ticket.block_ids   0 ........ num_sent ........ num_offered ........ computed ........ len(block_ids)
                       |  off this host  |   staged, on the wire  |  next chunk  | still to be computed |

A block is offered once it is full, the last one when the prompt is complete; or all that is left at once, some layers
at a time, while the prompt's last step computes it. Payloads are copies: once everything is offered the request's own
blocks may be freed, while the wire still sends.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kvtransfer.transport import Chunk
from protos.values import Ticket


class Session:
    """The sender's side of a ticket. Its lease runs here only while an offered block has not left: from the first
    offer, and again from each block that is sent. It does not bound how long a prompt waits and computes."""

    def __init__(self, ticket: Ticket, *, max_chunk_blocks: int) -> None:
        assert max_chunk_blocks > 0
        self.ticket = ticket
        self.num_offered = 0
        self.num_sent = 0
        self._num_parts_sent = 0  # of the blocks after those: layers of a block
        self._max_chunk_blocks = max_chunk_blocks
        self._deadline_s = math.inf

    @property
    def first_block(self) -> int:
        """Index, in the prompt's blocks, of the ticket's first: the destination holds those before it."""
        return self.ticket.num_cached_tokens // self.ticket.layout.block_size

    @property
    def all_offered(self) -> bool:
        return self.num_offered == len(self.ticket.block_ids)

    def fits(self, num_tokens: int) -> bool:
        """True if the ticket is for a sequence of this many tokens."""
        size = self.ticket.layout.block_size
        return self.first_block + len(self.ticket.block_ids) == -(-num_tokens // size)

    def is_full(self, num_tokens: int) -> bool:
        """True if a sequence of this many tokens would have no room for one more."""
        return num_tokens >= (self.first_block + len(self.ticket.block_ids)) * self.ticket.layout.block_size

    def all_sent(self, num_computed: int) -> bool:
        """True if all full blocks have left this host."""
        num_full = num_computed // self.ticket.layout.block_size - self.first_block
        return self.num_sent >= min(num_full, len(self.ticket.block_ids))

    def truncate(self, num_tokens: int) -> None:
        """The sequence will have this many tokens: the ticket's further blocks stay empty."""
        num_blocks = max(0, -(-num_tokens // self.ticket.layout.block_size) - self.first_block)
        assert self.num_offered <= num_blocks <= len(self.ticket.block_ids), "a sequence shrank, or outgrew its ticket"
        self.ticket = replace(self.ticket, block_ids=self.ticket.block_ids[:num_blocks])

    def next_chunk(self, num_computed: int, *, complete: bool) -> Chunk | None:
        """The blocks to offer next when `num_computed` tokens have their KV. `complete`: these are all tokens."""
        size = self.ticket.layout.block_size
        num_full = num_computed // size - self.first_block
        num_ready = len(self.ticket.block_ids) if complete else min(num_full, len(self.ticket.block_ids))
        num_blocks = min(num_ready - self.num_offered, self._max_chunk_blocks)
        if num_blocks < 1:
            return None
        return Chunk(
            ticket_id=self.ticket.ticket_id,
            generation=self.ticket.generation,
            first_block=self.num_offered,
            num_blocks=num_blocks,
        )

    def last_chunks(self, now: float, *, least_bytes: int) -> tuple[Chunk, ...]:
        """All that is left, in groups of layers of about `least_bytes` or more, in the order of the layers: offered
        from now on. A group of many blocks is cut like any other offer."""
        layout, first_block, stop = self.ticket.layout, self.num_offered, len(self.ticket.block_ids)
        if first_block == stop:
            return ()
        layer_bytes = (stop - first_block) * layout.block_bytes // layout.num_layers
        size = min(-(-least_bytes // layer_bytes), layout.num_layers)
        chunks = tuple(
            Chunk(
                ticket_id=self.ticket.ticket_id,
                generation=self.ticket.generation,
                first_block=block,
                num_blocks=min(self._max_chunk_blocks, stop - block),
                first_layer=layer,
                num_layers=None if size == layout.num_layers else min(size, layout.num_layers - layer),
            )
            for layer in range(0, layout.num_layers, size)
            for block in range(first_block, stop, self._max_chunk_blocks)
        )
        self._offered(stop - first_block, now)
        return chunks

    def offered(self, chunk: Chunk, now: float) -> None:
        assert chunk.first_block == self.num_offered, "chunks are offered in order"
        self._offered(chunk.num_blocks, now)

    def _offered(self, num_blocks: int, now: float) -> None:
        if self.num_sent == self.num_offered:
            self._deadline_s = now + self.ticket.lease_s
        self.num_offered += num_blocks

    def sent(self, chunk: Chunk, now: float) -> None:
        num_layers = self.ticket.layout.num_layers
        if chunk.num_layers is None:
            self.num_sent += chunk.num_blocks
        else:
            self._num_parts_sent += chunk.num_blocks * chunk.num_layers
        if self._num_parts_sent == (self.num_offered - self.num_sent) * num_layers > 0:
            self.num_sent, self._num_parts_sent = self.num_offered, 0
        assert self.num_sent <= self.num_offered
        all_sent = self.num_sent == self.num_offered
        self._deadline_s = math.inf if all_sent else now + self.ticket.lease_s

    @property
    def deadline_s(self) -> float:
        """When the lease ends unless something is sent; infinity where nothing is on the wire."""
        return self._deadline_s

    def expired(self, now: float) -> bool:
        """True if offered blocks have been stuck for so long that the destination may have reused its blocks."""
        return now >= self._deadline_s
