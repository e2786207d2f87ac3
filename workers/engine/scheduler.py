"""Which tokens each step computes, in which blocks, and what a sampled token means. Pure: no torch, no clock.

    add ──▶ WAITING ── plan: blocks for all its tokens ──▶ RUNNING ── apply: a stop condition ──▶ FINISHED
               ▲                                            │   └─── apply: the role says HOLD ──▶ HELD ── release ─▶
               └──────── plan: somebody needs its blocks ───┘

`plan` fills a step: first every sequence that decodes, one token each; then prompts under way; then new ones, as long
as tokens, sequences and blocks last. A sequence gets blocks for all it knows when it is admitted, and one more
whenever its answer grows into it. If there is none, the request of the largest rank gives up its own: so the one of
the smallest rank always moves on, and everybody becomes that one.

`plan` and `apply` meet only in the batches between them (`_in_flight`, oldest first).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from kvtransfer.hashing import chain_hashes, salted
from protos.values import BlockHash, FinishReason, GenerateRequest, SequenceUpdate
from workers.config import SchedulerConfig
from workers.engine.batch import Batch, Row, RowOutput, Sample, StepOutput
from workers.engine.request import Request, State
from workers.engine.role import Disposition, Role
from workers.kv.blocks import BlockPool


def no_key(num_prompt: int) -> bytes:
    """For models whose KV depends on tokens alone: nearly all."""
    return b""


def _rank(request: Request) -> tuple[float, int]:
    return request.rank


class Scheduler:
    """Continuous batching over one block pool. Requests given to `add` have been validated (`Engine.submit`).

    `prefix_key` of a prompt's length: prompts with different keys share no cached blocks (`ModelConfig.prefix_key`).
    """

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, role: Role, *, prefix_key: Callable[[int], bytes] = no_key
    ) -> None:
        self.config = config
        self.pool = pool
        self.role = role
        self.prefix_key = prefix_key
        self.max_len = min(config.max_model_len, pool.num_blocks * pool.block_size)
        """Longest sequence, prompt and answer, that fits an otherwise empty pool."""
        self.blocked = False
        """Did the last plan leave a request waiting for want of blocks? Then nobody should reserve any."""
        self.num_preemptions = 0
        self._num_added = 0
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # by rank
        self._running: list[Request] = []  # by rank
        self._promised: dict[BlockHash, Request] = {}  # blocks of running prompts that are not sealed yet
        self._in_flight: deque[tuple[Request, ...]] = deque()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens that are still to be computed; what the cache will save of those waiting is not known yet."""
        running = sum(request.num_to_compute for request in self._running if request.num_to_compute > 1)
        return running + sum(request.num_to_compute for request in self._waiting if not request.adopted)

    def has_requests(self) -> bool:
        """Also those that are only held."""
        return bool(self._requests)

    # -- coming and going ----------------------------------------------------------------------------------------------

    def add(self, asked: GenerateRequest, now: float) -> None:
        assert asked.request_id not in self._requests
        request = Request.of(asked, arrival_s=now)
        request.cache_salt = salted(asked.cache_salt, self.prefix_key(request.num_prompt))
        request.rank = (now - asked.priority * self.config.priority_head_start_s, self._num_added)
        self._num_added += 1
        self._extend_hashes(request)
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=_rank)

    def abort(self, request_ids: Iterable[str]) -> int:
        """Ends requests wherever they are; how many were known. A step in flight may still compute them: in vain."""
        known = [
            self._requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._requests
        ]
        for request in known:
            if request.state is State.HELD:
                self.role.forget(request)
            else:
                self._end(request)
        return len(known)

    def release(self, request_id: str) -> bool:
        """Ends a request on the role's own word, without telling it. False if there is none."""
        request = self._requests.get(request_id)
        if request is not None:
            self._drop(request)
        return request is not None

    # -- plan ----------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Batch | None:
        """The next step, or None if nothing can run. Every batch must be applied, in the order they were planned."""
        rows: list[tuple[Request, Row]] = []
        budget = self.config.max_num_batched_tokens
        for request in tuple(self._running):
            if request.state is State.RUNNING and request.num_to_compute == 1 and self._grow(request):
                rows.append((request, self._row(request, 1)))
                budget -= 1
        for request in self._running:
            if request.num_to_compute > 1 and budget > 0:
                budget -= self._take_chunk(request, budget, rows)
        self._admit(now, budget, rows)
        if not rows:
            return None
        self._in_flight.append(tuple(request for request, _ in rows))
        return Batch(rows=tuple(row for _, row in rows))

    def _take_chunk(self, request: Request, budget: int, rows: list[tuple[Request, Row]]) -> int:
        num_tokens = min(request.num_to_compute, self.config.prefill_chunk, budget)
        rows.append((request, self._row(request, num_tokens)))
        return num_tokens

    def _admit(self, now: float, budget: int, rows: list[tuple[Request, Row]]) -> None:
        """Lets waiting requests in, by rank. The first that lacks blocks holds back all behind it, except those that
        hold blocks already: only they can give them back."""
        self.blocked = False
        for request in self._waiting:
            asked_before = request.adopted or request.num_preemptions > 0
            if not asked_before and not self.role.admissible(request, now):
                continue
            if budget == 0 or len(self._running) == self.config.max_num_seqs:
                continue
            if self.blocked and not request.adopted:
                continue
            matched = self._match(request)
            if matched is None:
                continue
            if not self._provide(request, matched):
                self.blocked = True
                continue
            self._start(request)
            budget -= self._take_chunk(request, budget, rows)
        self._waiting = [request for request in self._waiting if request.state is State.WAITING]
        if self.blocked and not self._running:
            self._break_tie()

    def _break_tie(self) -> None:
        """Requests that adopted blocks, and each lack another one, would wait for each other for ever: the last in
        rank gives up its own, and recomputes them when it is let in."""
        adopted = [request for request in self._waiting if request.adopted]
        if len(adopted) > 1:
            self._unqueue(adopted[-1])
            self._preempt(adopted[-1])

    def _match(self, request: Request) -> list[int] | None:
        """Cached blocks the request can start from; None if it had better wait for those a sibling is computing.

        Waits until the last block they share is there (or the sibling is gone), and looks at that one only.
        """
        if request.adopted:
            return []
        if request.awaited is not None and request.awaited in self._promised:
            return None
        usable = request.hashes[: self._num_cacheable(request)]
        matched = self.pool.match(usable)
        request.awaited = None
        for block_hash in usable[len(matched) :]:
            if block_hash not in self._promised:
                break
            request.awaited = block_hash
        return matched if request.awaited is None else None

    def _num_cacheable(self, request: Request) -> int:
        """Blocks that need not be computed if they are cached: never the last token, which is to be sampled from,
        nor prompt positions whose logprobs have been asked for."""
        limit = request.num_tokens - 1
        if request.owes_prompt_logprobs:
            limit = min(limit, request.num_prompt_reported)
        return limit // self.pool.block_size

    def _provide(self, request: Request, matched: list[int]) -> bool:
        """All the blocks the request needs now, or none. Leaves a block for each running sequence to grow into, lest
        the newcomer be preempted at once; adopted blocks are taken already, so there it would help nobody."""
        self.pool.acquire(matched)
        needed = max(0, self.pool.blocks_for(request.num_tokens) - len(request.block_ids) - len(matched))
        headroom = 0 if request.adopted else len(self._running)
        fresh = self.pool.allocate(needed) if self.pool.num_free >= needed + headroom else None
        if fresh is None:
            self.pool.release(matched)
            return False
        request.block_ids += matched + fresh
        request.num_computed += len(matched) * self.pool.block_size
        request.num_sealed = len(matched)
        return True

    def _start(self, request: Request) -> None:
        if request.num_preemptions == 0 and not request.adopted:
            request.num_cached = request.num_computed
        request.state = State.RUNNING
        insort(self._running, request, key=_rank)
        for block_hash in request.hashes[request.num_computed // self.pool.block_size :]:
            self._promised.setdefault(block_hash, request)
        self._seal(request)

    def _grow(self, request: Request) -> bool:
        """A block for the token about to be computed, if need be another request's. False: it was the last in rank
        itself, and has been preempted."""
        while len(request.block_ids) < self.pool.blocks_for(request.num_tokens):
            fresh = self.pool.allocate(1)
            if fresh is not None:
                request.block_ids += fresh
                continue
            last = self._running.pop()
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._free(request)
        request.state = State.WAITING
        request.num_computed = request.num_sealed = 0
        request.adopted = False
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, request, key=_rank)

    def _row(self, request: Request, num_tokens: int) -> Row:
        start, stop = request.num_computed, request.num_computed + num_tokens
        samples = stop == request.num_tokens and request.sampling.max_tokens > 0
        owes = request.owes_prompt_logprobs
        return Row(
            request_id=request.request_id,
            token_ids=request.tokens(start, stop),
            start=start,
            block_ids=tuple(request.block_ids),
            sample=self._sample(request) if samples else None,
            prompt_targets=request.prompt_ids[start + 1 : stop + 1] if owes else (),
            num_prompt_logprobs=(request.sampling.prompt_logprobs or 0) if owes else 0,
            prompt_len=request.num_prompt,
        )

    def _sample(self, request: Request) -> Sample:
        params = request.sampling
        penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
        index = len(request.output_ids)
        return Sample(
            params=params,
            index=index,
            prompt_ids=request.prompt_ids if penalised else (),
            output_ids=tuple(request.output_ids) if penalised else (),
            banned_ids=self._stop_ids(request) if index < params.min_tokens else (),
        )

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        eos_ids = () if request.sampling.ignore_eos else self.config.eos_ids
        return eos_ids + request.sampling.stop_token_ids

    # -- apply ---------------------------------------------------------------------------------------------------------

    def apply(self, batch: Batch, output: StepOutput) -> list[SequenceUpdate]:
        """What the oldest planned batch brought. Rows of requests that are gone by now are dropped."""
        requests = self._in_flight.popleft()
        updates = []
        for request, row, out in zip(requests, batch.rows, output.rows, strict=True):
            assert request.request_id == row.request_id, "batches are applied in the order they were planned"
            if request.state is State.RUNNING:
                update = self._advance(request, row, out)
                if update is not None:
                    updates.append(update)
        return updates

    def _advance(self, request: Request, row: Row, out: RowOutput) -> SequenceUpdate | None:
        assert request.num_computed == row.start
        request.num_computed += len(row.token_ids)
        self._seal(request)
        prompt_logprobs = out.prompt_logprobs[request.num_prompt_reported - row.start :] if row.prompt_targets else ()
        request.num_prompt_reported += len(prompt_logprobs)
        finish_reason: FinishReason | None = None
        first = False
        if row.sample is not None:
            assert out.token_id is not None, f"nothing was sampled for request {request.request_id}"
            request.output_ids.append(out.token_id)
            finish_reason = self._finish_reason(request, out.token_id)
            first = len(request.output_ids) == request.num_given + 1
        elif request.num_to_compute == 0:  # max_tokens is 0: it was all about the prompt
            finish_reason = FinishReason.LENGTH
            first = True
        if finish_reason is not None:
            self._end(request)
        elif first:
            finish_reason = self._after_prefill(request)
        elif row.sample is None and not prompt_logprobs:
            return None
        return SequenceUpdate(
            request_id=request.request_id,
            token_ids=(out.token_id,) if row.sample is not None and out.token_id is not None else (),
            logprobs=(out.logprobs,) if out.logprobs is not None else (),
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            num_cached_tokens=request.num_cached if first else 0,
        )

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        if token_id in self._stop_ids(request):
            return FinishReason.STOP
        if len(request.output_ids) >= request.sampling.max_tokens or request.num_tokens >= self.max_len:
            return FinishReason.LENGTH
        return None

    def _after_prefill(self, request: Request) -> FinishReason | None:
        disposition = self.role.after_prefill(request)
        if disposition is Disposition.KEEP:
            return None
        if disposition is Disposition.HOLD:
            self._unqueue(request)
            request.state = State.HELD
        else:
            self._end(request)
        return FinishReason.PREFILLED

    def _seal(self, request: Request) -> None:
        """Registers the blocks that have become full and computed, of prompt and answer alike."""
        num_full = request.num_computed // self.pool.block_size
        if num_full > len(request.hashes):
            self._extend_hashes(request)
        for index in range(request.num_sealed, num_full):
            block_hash = request.hashes[index]
            self.pool.seal(request.block_ids[index], block_hash, request.hashes[index - 1] if index else b"")
            if self._promised.get(block_hash) is request:
                del self._promised[block_hash]
        request.num_sealed = num_full

    def _extend_hashes(self, request: Request) -> None:
        size, known = self.pool.block_size, len(request.hashes)
        fresh = request.tokens(known * size, request.num_tokens // size * size)
        parent = request.hashes[-1] if known else None
        request.hashes += chain_hashes(fresh, size, salt=request.cache_salt, parent=parent)

    # -- letting go ----------------------------------------------------------------------------------------------------

    def _end(self, request: Request) -> None:
        self.role.forget(request)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        self._unqueue(request)
        self._free(request)
        request.state = State.FINISHED
        del self._requests[request.request_id]

    def _unqueue(self, request: Request) -> None:
        if request.state in (State.WAITING, State.RUNNING):
            queue = self._waiting if request.state is State.WAITING else self._running
            del queue[bisect_left(queue, request.rank, key=_rank)]

    def _free(self, request: Request) -> None:
        for block_hash in request.hashes[request.num_sealed :]:
            if self._promised.get(block_hash) is request:
                del self._promised[block_hash]
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.awaited = None

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check_integrity(self, reserved_ids: Sequence[int] = ()) -> None:
        """Every reference in the pool is some request's, or one of `reserved_ids` (blocks promised by tickets)."""
        self.pool.check_integrity()
        for queue, state in ((self._waiting, State.WAITING), (self._running, State.RUNNING)):
            assert all(request.state is state for request in queue)
            assert all(a.rank < b.rank for a, b in pairwise(queue)), "a queue is out of order"
        held = [request for request in self._requests.values() if request.state is State.HELD]
        assert len(held) + len(self._waiting) + len(self._running) == len(self._requests)
        references = Counter(reserved_ids)
        for request in self._requests.values():
            references.update(request.block_ids)
            self._check_request(request)
        for block_id in range(self.pool.num_blocks):
            held_by, counted = references[block_id], self.pool.num_references(block_id)
            assert held_by == counted, f"block {block_id} has {counted} references, its holders know of {held_by}"
        for block_hash, request in self._promised.items():
            assert request.state is State.RUNNING, "a block is promised by nobody who computes"
            assert block_hash in request.hashes[request.num_sealed :]

    def _check_request(self, request: Request) -> None:
        size = self.pool.block_size
        assert len(request.block_ids) * size >= request.num_computed
        assert request.num_sealed <= request.num_computed // size
        if request.state is State.RUNNING:
            assert request.num_to_compute >= 1, "a running request has nothing to compute"
            assert request.num_sealed == request.num_computed // size
        if request.state is State.WAITING:
            assert request.adopted == bool(request.block_ids) == bool(request.num_computed)
        for index in range(request.num_sealed):
            sealed = self.pool.hash_of(request.block_ids[index])
            assert sealed in (None, request.hashes[index]), "a block holds something else than its holder believes"

    def assert_idle(self) -> None:
        """Nothing is known of any request, and no block is held."""
        assert not self._requests, f"requests {sorted(self._requests)} are still here"
        assert not self._promised
        assert not self._in_flight
        self.pool.assert_idle()
