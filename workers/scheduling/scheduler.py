"""Plans the tokens and blocks of each step, and applies the sampled tokens. Pure: no torch, no clock.

    add ──▶ WAITING ── plan: blocks for all its tokens ──▶ RUNNING ── apply: a stop condition ──▶ FINISHED
               ▲                                            │   └─── apply: the role answers HOLD ──▶ HELD ── release ─▶
               └──────── plan: another needs its blocks ────┘

`plan` fills a step: first every sequence that decodes, one token each; then prompts under way; then new requests, as
long as tokens, sequences and blocks last. A sequence gets blocks for all its tokens when it is admitted, and one more
whenever its answer grows into it. If no block is free, the request of the largest rank is preempted: so the one of the
smallest rank always proceeds, and in the end every request has the smallest rank.

`plan` and `apply` share only the steps between them (`_in_flight`, oldest first). Step n + 1 may be planned before step
n is applied; then

- its decoding rows depend on those of step n, whose tokens they read on the device;
- a request has no row in it if it is known to end in step n, if its role may hand it over then, or if the host needs
  the token of step n to choose the next one (grammars, and penalties with two unknown tokens: the device counts one);
- if a request turns out to have ended in step n, its row in step n + 1 is discarded;
- blocks of a request that has gone are free when the last step that computes it is applied;
- no request is preempted: a plan that lacks blocks to grow into is None until step n is applied.

With several groups of layers, or windows (`kvtransfer.windows`), a sequence has a table for each group. Groups with a
window get pages for the worst moment of the prompt at admission, then those that the next step writes, before any row
is planned. Once a step is applied, pages behind the window go back to the pool; sealed, they stay cached until the pool
needs them. So a prompt lacks pages in its midst only if others took these meanwhile: then it preempts, as answers do.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec.structs import replace

from kvtransfer.hashing import chain_hashes, salted
from protos.values import BlockHash, FinishReason, GenerateRequest, SequenceUpdate
from workers.batch import Batch, Row, RowOutput, StepOutput
from workers.kv.block_pool import BlockPool, CachedPrefix
from workers.scheduling import page_tables
from workers.scheduling.checks import check_blocks, check_queues
from workers.scheduling.onloads import Onloads
from workers.scheduling.pending_blocks import PendingBlocks
from workers.scheduling.planned_drafts import draft_counts, notify_computed, plan_drafts, without_waiting
from workers.scheduling.prefix_hits import PrefixHits, num_cacheable
from workers.scheduling.request import PlannedStep, Request, State
from workers.scheduling.role import Disposition, Role
from workers.scheduling.step_rows import decodable, extend, next_row, update_of
from workers.scheduling.time_slicing import enter_batch, leave_batch, rank_behind, sequences_to_pause
from workers.speculation.speculation import Speculation
from workers.worker_config import SchedulerConfig


def no_key(num_prompt: int) -> bytes:
    """The prefix key of models whose KV depends on tokens alone, as in nearly all models."""
    return b""


def _rank(request: Request) -> tuple[float, int]:
    return request.rank


class Scheduler:
    """Continuous batching over one block pool. Requests given to `add` have been validated (`Engine.submit`).

    `prefix_key` maps a prompt's length to a key: prompts with different keys share no cached blocks
    (`ModelConfig.prefix_key`). `speculation` proposes drafts for rows that decode; without it there are none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        role: Role,
        *,
        prefix_key: Callable[[int], bytes] = no_key,
        speculation: Speculation | None = None,
    ) -> None:
        self.config = config
        self.speculation = speculation
        self.pool = pool
        self.role = role
        self.prefix_key = prefix_key
        self.max_len = pool.windows.longest(pool.num_blocks, config.largest_chunk, most=config.max_model_len)
        """Longest sequence, prompt and answer, that fits an otherwise empty pool."""
        self._blocked = False
        self.num_preemptions = 0
        self.onloads = Onloads(pool)
        self._num_added = 0
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # by rank
        self._running: list[Request] = []  # by rank
        self._pending = PendingBlocks()  # of running prompts, not sealed yet
        self._prefixes = PrefixHits(pool, self._pending)
        self._in_flight: deque[PlannedStep] = deque()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Running requests by rank, which is the order of a batch's decoding rows."""
        return self._running

    @property
    def num_leaving_blocks(self) -> int:
        """References to blocks of ended requests. They are released after the last step that computes these
        requests."""
        return sum([len(freed) for step in self._in_flight for freed in step.freed])

    @property
    def blocked(self) -> bool:
        """Whether the last plan left a request waiting for blocks, and its client reads. Then no blocks should be
        reserved for tickets. False once no request waits, even without a further plan."""
        return self._blocked and bool(self._waiting)

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens to be computed. For waiting requests, `Onloads.prefix_savings` are left out."""
        left = [len(r.prompt_ids) + len(r.output_ids) - r.num_computed for r in self._running]  # many: no calls
        running = sum([num for num in left if num > 1])
        waiting = (r.num_to_compute - self.onloads.prefix_savings(r) for r in self._waiting if not r.adopted)
        return running + sum(waiting)

    def has_requests(self) -> bool:
        """Whether there are requests, held ones included, or onloads whose requests have ended."""
        return bool(self._requests) or len(self.onloads) > 0

    # -- adding and removing requests ----------------------------------------------------------------------------------

    def add(self, given: GenerateRequest, now: float) -> None:
        assert given.request_id not in self._requests
        request = Request.of(given, arrival_s=now)
        page_tables.reset_tables(request, self.pool.windows.num_groups)
        request.cache_salt = salted(given.cache_salt, self.prefix_key(request.num_prompt))
        request.rank = (now - given.priority * self.config.priority_head_start_s, self._num_added)
        self._num_added += 1
        self._extend_hashes(request)
        request.prefix_savings = self._prefixes.savings(request)
        self._requests[request.request_id] = request
        if self.speculation is not None:
            self.speculation.begin(request, given.sampling.speculation)
        insort(self._waiting, request, key=_rank)

    def abort(self, request_ids: Iterable[str]) -> int:
        """Ends requests in any state, and returns how many there were. A step in flight may still compute them; their
        blocks are free when it is applied."""
        known = [self._requests[name] for name in dict.fromkeys(request_ids) if name in self._requests]
        for request in known:
            if request.state is State.HELD:
                self.role.drop(request)
            else:
                self._end(request)
        return len(known)

    def requests(self) -> Collection[Request]:
        return self._requests.values()

    def find(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def set_unread(self, request_id: str, is_unread: bool, now: float) -> None:
        """Ranks a request whose client reads nothing after all others until the client reads on: it runs only in slots
        and blocks that no other request needs. Ignores an unknown request."""
        request = self._requests.get(request_id)
        if request is None or request.is_unread == is_unread:
            return
        self._unqueue(request)
        request.is_unread = is_unread
        request.rank = rank_behind(request, self.config, now)
        if (queue := self._queue(request)) is not None:
            insort(queue, request, key=_rank)

    def hold(self, request_id: str) -> bool:
        """Takes a running request out of the batch for its role; its blocks stay until `release`. Results of a step in
        flight are dropped. False if the request is not running."""
        request = self._requests.get(request_id)
        if request is None or request.state is not State.RUNNING:
            return False
        self._unqueue(request)
        request.state = State.HELD
        return True

    def release(self, request_id: str) -> bool:
        """Ends a request for its role, without `Role.drop`. False for an unknown request."""
        request = self._requests.get(request_id)
        if request is not None:
            self._drop(request)
        return request is not None

    # -- plan ----------------------------------------------------------------------------------------------------------

    def plan(self, now: float, mask_pending: Collection[str] = ()) -> Batch | None:
        """The next batch, or None if nothing can run now. Every batch must be applied, in the order they were planned.
        Requests in `mask_pending` neither begin nor decode."""
        self.onloads.poll()
        if self._waiting and not self._make_room(now):
            return None
        if self.pool.has_windows and not self._take_chunk_pages():
            return None
        rows: list[tuple[Request, Row]] = []
        budget = self.config.max_num_batched_tokens
        sampled = self._in_flight[-1].sampling if self._in_flight else {}
        unmasked = [each for each in self._running if each.request_id not in mask_pending]
        decoding = list(decodable(unmasked, sampled, max_len=self.max_len, block_size=self.pool.block_size))
        if self.speculation is not None and self._in_flight:
            decoding = without_waiting(self.speculation, decoding)
        if self._in_flight and sum([lacking for _, lacking in decoding]) > self.pool.num_free:
            return None
        growing = [
            request
            for request, lacking in decoding
            if request.state is State.RUNNING and (lacking <= 0 or self._grow(request, lacking))
        ]
        budget -= len(growing)
        drafts = plan_drafts(
            self.speculation, growing, self._running, self.pool,
            eos_ids=self.config.eos_ids, max_len=self.max_len, budget=budget,
        )  # fmt: skip
        rows += [(request, self._row(request, 1, drafts.get(request.request_id, ()))) for request in growing]
        budget -= sum(map(len, drafts.values()))
        for request in self._running if len(rows) < len(self._running) else ():
            if request.num_to_plan > 1 and budget > 0:
                budget -= self._take_chunk(request, budget, rows)
        self._admit(now, budget, rows, mask_pending)
        while not rows and self.onloads.finish_next():
            self._admit(now, budget, rows, mask_pending)
        if not rows:
            return None
        sampling = {request: index for index, (request, row) in enumerate(rows) if row.sample is not None}
        self._in_flight.append(PlannedStep(requests=tuple([request for request, _ in rows]), sampling=sampling))
        return Batch(rows=tuple([row for _, row in rows]))

    def _make_room(self, now: float) -> bool:
        """Moves sequences whose time slice is over, with their blocks, to the end of the queue. False if steps in
        flight with their rows must end first."""
        leaving = sequences_to_pause(
            self._running, self._waiting, self.pool, self.config, now, is_blocked=self._blocked
        )
        if leaving and self._in_flight:
            return False
        for request in leaving:
            self._unqueue(request)
            self._pending.discard(request, request.hashes[request.num_sealed :])
            leave_batch(request, self.config, now)
            insort(self._waiting, request, key=_rank)
        return True

    def prolong(self, batch: Batch, num_steps: int) -> Batch:
        """The only planned batch, extended by `num_steps` steps. Every running request decodes in it, no request ends
        before the last step, and there are blocks for all."""
        (step,) = self._in_flight
        assert len(step.requests) == len(step.sampling) == len(self._running), "not every request decodes"
        rows = list(batch.rows)
        for index, request in enumerate(step.requests):
            request.num_planned += num_steps
            request.num_due += num_steps
            if len(request.block_ids) * self.pool.block_size < request.num_planned:  # by one: the last step's
                page_tables.extend_tables(request, self.pool)
                rows[index] = replace(rows[index], block_tables=tuple([tuple(table) for table in request.tables]))
        return Batch(rows=tuple(rows), num_steps=batch.num_steps + num_steps)

    def _take_chunk_pages(self) -> bool:
        """Takes the pages that the next chunk of each running prompt writes, before any row is planned: prompts without
        room may preempt others. False if steps in flight must end first."""
        lacking = page_tables.chunks_lacking(self._running, self.pool, self.config.largest_chunk)
        if self._in_flight and sum([num for _, num in lacking]) > self.pool.num_free:
            return False
        for request, num_pages in lacking:
            if request.state is State.RUNNING and num_pages:
                self._grow(request, num_pages)
        return True

    def _take_chunk(self, request: Request, budget: int, rows: list[tuple[Request, Row]]) -> int:
        num_tokens = min(request.num_to_plan, self.config.prefill_chunk, budget)
        rows.append((request, self._row(request, num_tokens)))
        return num_tokens

    def _admit(self, now: float, budget: int, rows: list[tuple[Request, Row]], mask_pending: Collection[str]) -> None:
        """Admits waiting requests by rank. The first request that lacks blocks holds back all later ones, except those
        that hold blocks already: only they can free some. A waiting request whose client reads nothing gives its blocks
        to it instead."""
        self._blocked = is_short = False
        for request in self._waiting:
            if request.request_id in mask_pending:
                continue
            asked_before = bool(request.block_ids) or request.num_preemptions > 0
            if not asked_before and not self.role.admissible(request, now):
                continue
            if budget == 0:
                continue
            request.awaits_slot = not self._has_batch_slot(request)
            gives_way = (
                self._blocked and request.is_unread and request.onload is None
            )  # a loaded request starts, and can give way then
            if request.awaits_slot or (is_short and not request.block_ids) or gives_way:
                continue
            matched = self._prefixes.match(request)
            if matched is None:
                continue
            if not self._provide(request, matched):
                is_short, self._blocked = True, self._blocked or not request.is_unread
                continue
            if request.onload is None or request.onload.done:
                self._start(request, now)
                budget -= self._take_chunk(request, budget, rows)
        self._waiting = [request for request in self._waiting if request.state is State.WAITING]
        if is_short:
            self._take_back_blocks()

    def _has_batch_slot(self, request: Request) -> bool:
        if request.onload is not None:
            return request.onload.done
        return len(self._running) + self.onloads.num_batch_slots < self.config.max_num_seqs

    def _take_back_blocks(self) -> None:
        """Takes the blocks of the last waiting request that has some, if its client reads nothing and another request
        lacks blocks, or if nothing runs: requests with adopted blocks that each lack one would wait forever. The
        request is recomputed when it is admitted."""
        adopted = [request for request in self._waiting if request.adopted]
        is_tie = len(adopted) > 1 and not (self._running or self._in_flight or len(self.onloads))
        if is_tie or (self._blocked and adopted and adopted[-1].is_unread):
            self._unqueue(adopted[-1])
            self._preempt(adopted[-1])

    def _provide(self, request: Request, matched: CachedPrefix) -> bool:
        """Takes all blocks that the request needs now, or none, and begins the onload of those on the host. A request
        without blocks must leave one for each running sequence to grow into. Otherwise it would be preempted at
        once."""
        usable = request.hashes[: num_cacheable(request, self.pool.block_size)]
        prefix, slots = (matched, []) if request.block_ids else self.onloads.pin(usable, matched)
        limits = {"chunk": self.config.largest_chunk, "headroom": len(self._running)}
        if not page_tables.take_prompt_pages(request, prefix, self.pool, **limits):
            self.onloads.unpin(slots)
            return False
        if slots:
            self.onloads.begin(request, prefix, slots)
            self._pending.add(request, self._uncomputed(request))
            self.onloads.poll()
        return True

    def _uncomputed(self, request: Request) -> list[BlockHash]:
        return request.hashes[request.num_computed // self.pool.block_size :]

    def _start(self, request: Request, now: float) -> None:
        if request.num_preemptions == 0 and not request.adopted:
            request.num_cached = request.num_computed
        if request.onload is not None:
            num_blocks = request.num_computed // self.pool.block_size
            self._pending.discard(request, request.hashes[:num_blocks])
            if request.onload.num_clears != self.pool.num_clears:
                request.num_sealed = num_blocks  # the cache was reset: the blocks are the request's own
        if not request.adopted:
            self.onloads.start(request, request.hashes[: num_cacheable(request, self.pool.block_size)])
        request.num_planned = request.num_computed
        enter_batch(request, now)
        insort(self._running, request, key=_rank)
        self._pending.add(request, self._uncomputed(request))
        self._seal(request)

    def _grow(self, request: Request, num_blocks: int) -> bool:
        while num_blocks > 0:
            if (fresh := self.pool.allocate(1)) is not None:
                min(request.tables, key=len).extend(fresh)
                num_blocks -= 1
                continue
            last = self._running.pop()
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        assert self._last_step_of(request) is None, "a step in flight computes the request"
        self._free(request)
        request.state = State.WAITING
        request.num_computed = request.num_planned = request.num_sealed = 0
        request.adopted, request.pooled = False, None
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, request, key=_rank)

    def _row(self, request: Request, num_tokens: int, draft_ids: tuple[int, ...] = ()) -> Row:
        after = self._in_flight[-1].sampling.get(request) if self._in_flight else None
        return next_row(request, num_tokens, eos_ids=self.config.eos_ids, depends_on_row=after, draft_ids=draft_ids)

    # -- apply ---------------------------------------------------------------------------------------------------------

    def apply(self, batch: Batch, output: StepOutput) -> list[SequenceUpdate]:
        """Applies the oldest planned batch and returns its updates. Rows of ended requests are dropped.

        A row that samples may bring any number of tokens: none while its mask is pending, more with drafts. Positions
        after the last of them count as not computed, so that no such block is sealed. The number is unknown in advance,
        so no row of the next batch depends on such a row.
        """
        step = self._in_flight.popleft()
        for block_ids in step.freed:
            self.pool.release(block_ids)
        updates = []
        for request, row, out in zip(step.requests, batch.rows, output.rows, strict=True):
            assert request.request_id == row.request_id, "batches are applied in the order they were planned"
            if request.state is State.RUNNING:
                update = self._advance(request, row, out, batch.num_steps)
                if self.pool.has_windows and request.state is State.RUNNING:  # a transfer reads the others' pages
                    page_tables.give_back(request, self.pool)
                if update is not None:
                    updates.append(update)
        notify_computed(self.speculation, step.requests, batch)
        return updates

    def _advance(self, request: Request, row: Row, out: RowOutput, num_steps: int) -> SequenceUpdate | None:
        assert request.num_computed == row.start
        finish_reason: FinishReason | None = None
        token_ids: tuple[int, ...] = ()
        num_computed = row.stop - len(row.draft_ids)
        if row.sample is not None and out.error is None:
            first = len(request.output_ids) == request.num_given and bool(out.token_ids)
            token_ids, finish_reason = extend(request, out.token_ids, eos_ids=self.config.eos_ids, max_len=self.max_len)
            num_computed += len(token_ids) - 1
            request.num_due -= num_steps
            request.num_drafts = 0
            if self.speculation is not None:
                self.speculation.applied(request.request_id, row.draft_ids, len(token_ids))
            if len(token_ids) != num_steps:
                request.num_planned = num_computed
        else:  # the latter: max_tokens is 0, and the prompt is all there is
            first = row.sample is None and num_computed == request.num_tokens
            finish_reason = FinishReason.LENGTH if first else None
        request.num_computed = num_computed
        if num_computed // self.pool.block_size > request.num_sealed:
            self._seal(request)
        if out.error is not None:
            self._end(request)
            return SequenceUpdate(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=out.error)
        drafts = draft_counts(self.speculation, request, len(token_ids), is_last=finish_reason is not None)
        if finish_reason is not None:
            self._end(request)
        elif first:
            finish_reason = self._after_prefill(request)
        return update_of(request, row, out, token_ids, first=first, finish_reason=finish_reason, drafts=drafts)

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
        num_full = request.num_computed // self.pool.block_size
        if num_full == request.num_sealed:
            return
        if num_full > len(request.hashes):
            self._extend_hashes(request)
        start, request.num_sealed = request.num_sealed, num_full
        page_tables.seal_pages(request, self.pool, start, num_full)
        self._pending.discard(request, request.hashes[start:num_full])

    def _extend_hashes(self, request: Request) -> None:
        size, known = self.pool.block_size, len(request.hashes)
        parent = request.hashes[-1] if known else None
        request.hashes += chain_hashes(request.in_blocks(known, size), size, salt=request.cache_salt, parent=parent)

    # -- releasing blocks ----------------------------------------------------------------------------------------------

    def _end(self, request: Request) -> None:
        self.role.drop(request)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        self._unqueue(request)
        self._free(request)
        request.state = State.FINISHED
        if self.speculation is not None:
            self.speculation.end(request.request_id)
        del self._requests[request.request_id]

    def _queue(self, request: Request) -> list[Request] | None:
        return {State.WAITING: self._waiting, State.RUNNING: self._running}.get(request.state)

    def _unqueue(self, request: Request) -> None:
        if (queue := self._queue(request)) is not None:
            del queue[bisect_left(queue, request.rank, key=_rank)]

    def _free(self, request: Request) -> None:
        self._pending.discard(request, request.hashes[request.num_sealed :])
        step = self._last_step_of(request)
        if step is not None:
            step.freed += request.held()
        elif not self.onloads.drop(request):
            page_tables.release(request, self.pool)
        page_tables.drop_tables(request, self.pool)
        request.waiting_on_block = None

    def _last_step_of(self, request: Request) -> PlannedStep | None:
        return next((step for step in reversed(self._in_flight) if request in step.requests), None)

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check_integrity(self, reserved_ids: Sequence[int] = ()) -> None:
        """Asserts that every reference in the pool belongs to a request, an onload or a ticket (`reserved_ids`)."""
        check_queues(self._requests.values(), self._waiting, self._running)
        assert len(self._running) + self.onloads.num_batch_slots <= self.config.max_num_seqs, (
            "a batch has a sequence too many"
        )
        freed = [freed for step in self._in_flight for freed in step.freed]
        sampling = [step.sampling for step in self._in_flight]
        check_blocks(self.pool, self._requests.values(), sampling, (reserved_ids, self.onloads.held_ids(), *freed))
        self._pending.check_integrity()

    def assert_idle(self) -> None:
        assert not self._requests, f"requests {sorted(self._requests)} are still here"
        assert not len(self._pending)
        assert not self._in_flight
        assert not len(self.onloads), "blocks are still being loaded"
        if self.speculation is not None:
            self.speculation.assert_idle()
        self.pool.assert_idle()
