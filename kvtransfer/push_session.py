"""One push, as its sender sees it: which blocks of a ticket are computed, offered, sent. Pure integers and time.

    ticket.block_ids   0 ........ num_sent ........ num_offered ........ computed ........ len(block_ids)
                       |  off this host  |   staged, on the wire  |  next chunk  | still to be computed |

A block is offered once it is full, the last one when the prompt is complete; or all that is left at once, some layers
at a time, while the prompt's last step computes it. Payloads are copies: once everything is offered the request's own
blocks may be freed, while the wire still sends.

With several groups of layers each has such a line of its own, and a chunk is of one group. Of a window a ticket has
only the blocks that the next token reads.
"""

from __future__ import annotations

import math

from kvtransfer.transport import Chunk
from kvtransfer.windows import PageWindows
from protos.values import Ticket


class Session:
    """The sender's side of a ticket. Its lease runs only while an offered block is unsent, from the first offer and
    again from each sent block. It does not bound how long a prompt waits and computes.

    `max_chunk_blocks` is for blocks of all layers: a chunk of a smaller group has as many more."""

    def __init__(self, ticket: Ticket, *, max_chunk_blocks: int) -> None:
        assert max_chunk_blocks > 0
        self.ticket = ticket
        layout = ticket.layout
        self._windows = PageWindows(block_size=layout.block_size, windows=layout.windows)
        self._num_layers = [len(group.layers) for group in layout.groups]
        self._max_chunk_blocks = [max_chunk_blocks * layout.num_layers // num for num in self._num_layers]
        self._next = list(ticket.starts)  # for each group, the prompt's block that is offered next
        self._num_parts = [0] * len(self._next)  # offered and not sent: layers of a block
        self._deadline_s = math.inf

    @property
    def first_block(self) -> int:
        """Index of the ticket's first block in the prompt: the destination needs no earlier one."""
        return min(self.ticket.starts)

    @property
    def num_offered(self) -> int:
        return sum(self._next) - sum(self.ticket.starts)

    @property
    def num_sent(self) -> int:
        """Blocks of which all layers have been sent."""
        pairs = zip(self._num_parts, self._num_layers, strict=True)
        return self.num_offered - sum([-(-num // num_layers) for num, num_layers in pairs])

    @property
    def all_offered(self) -> bool:
        return min(self._next) == self.ticket.stop

    @property
    def needs_all(self) -> bool:
        """True if a shorter prefix would need other blocks: the ticket's do not begin at a window's first."""
        return any(self._windows.num_passed(self.ticket.stop * self.ticket.layout.block_size - 1))

    def fits(self, num_tokens: int) -> bool:
        """True if the ticket is for a sequence of this many tokens."""
        return self.ticket.stop == -(-num_tokens // self.ticket.layout.block_size)

    def is_full(self, num_tokens: int) -> bool:
        """Whether a sequence of this many tokens has no room for one more."""
        return num_tokens >= self.ticket.stop * self.ticket.layout.block_size

    def all_sent(self, num_computed: int) -> bool:
        num_full = min(num_computed // self.ticket.layout.block_size, self.ticket.stop)
        return min(self._next) >= num_full and not any(self._num_parts)

    def truncate(self, num_tokens: int) -> None:
        """The sequence will have this many tokens: the ticket's further blocks stay empty."""
        stop = max(-(-num_tokens // self.ticket.layout.block_size), *self.ticket.starts)
        assert max(self._next) <= stop <= self.ticket.stop, "a sequence shrank, or outgrew its ticket"
        self.ticket = self.ticket.up_to(stop)

    def forgo(self, num_computed: int) -> None:
        """Blocks that no token from `num_computed` on reads are not moved, unless they were offered already."""
        num_passed, stop = self._windows.num_passed(num_computed), self.ticket.stop
        self._next = [max(first, min(passed, stop)) for first, passed in zip(self._next, num_passed, strict=True)]

    def next_chunk(self, num_computed: int, *, complete: bool) -> Chunk | None:
        """The blocks to offer next when `num_computed` tokens have their KV. `complete`: these are all tokens."""
        num_full = num_computed // self.ticket.layout.block_size
        num_ready = self.ticket.stop if complete else min(num_full, self.ticket.stop)
        for group, first in enumerate(self._next):
            if first < num_ready:
                return self._chunk(group, first, min(num_ready - first, self._max_chunk_blocks[group]))
        return None

    def last_chunks(self, now: float, *, least_bytes: int) -> tuple[Chunk, ...]:
        """Offers the rest, in runs of layers of at least about `least_bytes`, in the order in which a step writes them.
        A run of many blocks is cut like any other offer."""
        layout, stop = self.ticket.layout, self.ticket.stop
        chunks: list[tuple[int, Chunk]] = []  # with the model's layer that completes the chunk
        for group, first in enumerate(self._next):
            if first == stop:
                continue
            layers = layout.groups[group].layers
            size = min(-(-least_bytes * len(layers) // ((stop - first) * layout.page_bytes(group))), len(layers))
            for layer in range(0, len(layers), size):
                part = range(layer, min(layer + size, len(layers)))
                chunks += [
                    (layers[part.stop - 1], self._chunk(group, block, num, part if len(part) < len(layers) else None))
                    for block in range(first, stop, self._max_chunk_blocks[group])
                    for num in (min(self._max_chunk_blocks[group], stop - block),)
                ]
            self._offered(group, stop - first, now)
        chunks.sort(key=lambda one: one[0])
        return tuple([chunk for _, chunk in chunks])

    def offered(self, chunk: Chunk, now: float) -> None:
        first = self.ticket.starts[chunk.group] + chunk.first_block
        assert first == self._next[chunk.group], "chunks are offered in order"
        self._offered(chunk.group, chunk.num_blocks, now)

    def sent(self, chunk: Chunk, now: float) -> None:
        self._num_parts[chunk.group] -= chunk.num_blocks * len(chunk.layers(self.ticket.layout))
        assert min(self._num_parts) >= 0
        all_sent = not any(self._num_parts)
        self._deadline_s = math.inf if all_sent else now + self.ticket.lease_s

    @property
    def deadline_s(self) -> float:
        """When the lease ends unless something is sent; infinity where nothing is on the wire."""
        return self._deadline_s

    def expired(self, now: float) -> bool:
        """Whether offered blocks have been stuck for so long that the destination may have reused its blocks."""
        return now >= self._deadline_s

    def _chunk(self, group: int, first: int, num_blocks: int, layers: range | None = None) -> Chunk:
        return Chunk(
            ticket_id=self.ticket.ticket_id,
            generation=self.ticket.generation,
            first_block=first - self.ticket.starts[group],
            num_blocks=num_blocks,
            first_layer=layers.start if layers else 0,
            num_layers=len(layers) if layers else None,
            group=group,
        )

    def _offered(self, group: int, num_blocks: int, now: float) -> None:
        if not any(self._num_parts):
            self._deadline_s = now + self.ticket.lease_s
        self._next[group] += num_blocks
        self._num_parts[group] += num_blocks * self._num_layers[group]
