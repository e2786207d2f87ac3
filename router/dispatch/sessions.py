"""Guesses a prompt's conversation if its client does not name one, by its first block that few other prompts share.

    system ─▶ prompt ─┬─▶ a's question ─▶ answer ─▶ a's next         the blocks of recent prompts, as a tree: all begin
                      ├─▶ b's question ─▶ ...                        with the system prompt, which forks into
                      └─▶ c's question ─▶ ...                        conversations

A prompt's first block is its session unless too many of the recent prompts begin with it: then the session is the block
after the next fork of the tree, and so on. A path without a fork is one conversation, however often it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from protos.chain import Chain
from protos.values import BlockHash

SHARE = 0.5  # share of the requests of a worker: a more frequent session could not be balanced
LEAST = 8  # prompts: a session may have this many, however few there have been
GENERATION = 4096  # prompts: a block that this many prompts did not contain is dropped
GROWTH = 16  # blocks that a prompt adds to the tree: most prompts' own blocks never occur again
MAX_DEPTH = 1024  # the first blocks of a prompt that are considered


@dataclass(slots=True)
class PromptNode:
    """A block of the tree: the number of its prompts in one generation, and the next block. `forks` is True once
    several blocks have followed."""

    num_prompts: int = 0
    child: BlockHash | None = None
    forks: bool = False

    def leads_to(self, block: BlockHash) -> None:
        self.forks = self.forks or self.child not in (None, block)
        self.child = block


class Sessions:
    """The tree of a router's latest prompts: `generation` to twice as many."""

    def __init__(self, generation: int = GENERATION) -> None:
        self._size = generation
        self._now: dict[BlockHash, PromptNode] = {}
        self._before: dict[BlockHash, PromptNode] = {}
        self._num_now = self._num_before = 0

    def of(self, hashes: Chain, num_workers: int) -> str:
        """The session of a prompt with these blocks, for this number of workers; "" if too many prompts share all
        blocks. The prompt counts from now on."""
        if self._num_now >= self._size:
            self._now, self._before = {}, self._now
            self._num_now, self._num_before = 0, self._num_now
        self._num_now += 1
        most = max(LEAST, SHARE * (self._num_now + self._num_before) / max(1, num_workers))
        session, num_new = "", 0
        above = PromptNode(forks=True)  # the first block may be a session, too
        for block in hashes[:MAX_DEPTH]:
            above.leads_to(block)
            begins, num_new = above.forks, num_new + (block not in self._now and block not in self._before)
            above, num_prompts = self._run_through(block)
            if begins:
                session = block.hex()
            if num_new >= GROWTH or (begins and num_prompts <= most):
                return session
        return "" if above.forks and len(hashes) <= MAX_DEPTH else session

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the tree."""
        return len(self._now) + len(self._before)

    def _run_through(self, block: BlockHash) -> tuple[PromptNode, int]:
        """The block's node, and the number of prompts with the block, including this one."""
        before = self._before.get(block)
        node = self._now.get(block)
        if node is None:
            node = self._now[block] = (
                PromptNode() if before is None else PromptNode(child=before.child, forks=before.forks)
            )
        node.num_prompts += 1
        return node, node.num_prompts + (before.num_prompts if before is not None else 0)
