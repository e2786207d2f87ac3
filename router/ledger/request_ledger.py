"""Makes the rows of a gateway: one for each request that has ended, and the fleet's devices of each minute."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from protos.errors import ERRORS_BY_CODE, BatonError, BudgetExhausted, Overloaded, Unavailable, code_of
from protos.event_loop import loop_time
from router.auth.budgets import TenantBudgets
from router.jobs import FleetView
from router.ledger.costing import WorkerRate, num_devices, rate_of, work_of
from router.ledger.ledger_report import spent_by_tenant
from router.ledger.ledger_store import LedgerStore
from router.ledger.ledger_tables import LOST
from router.ledger.prices import KINDS, PriceList
from router.ledger.rows import FleetMinute, LedgerRow, OpenRequest
from router.ledger.worker_counts import WorkerCounts
from router.text.sampling_request import TextRequest
from router.text.text_stream import Usage, UsageCounter
from router.traces.request_trace import RequestTrace, RequestTraces

log = logging.getLogger("baton.ledger")

LOOK_S = 1.0
"""Age of the speeds by which a request's device seconds are estimated, at most."""
NOTE_S = 2.0
"""Between two notes of a request that is being answered; the first is made after `LOOK_S`."""
READ_LOOKS, RECOVER_LOOKS = 5, 30
"""How often, in looks, the sums of budgets are read and workers' counts written; lost processes looked for, and rows
deleted that are old."""


_FREE = dict.fromkeys(KINDS, 0.0)


def may_pass(error: BatonError) -> bool:
    """Whether a line of a batch is tried again that failed so, for it may succeed soon."""
    return error.retryable or (isinstance(error, Overloaded) and not isinstance(error, BudgetExhausted))


def is_free(outcome: str, num_output: int, *, is_batch: bool) -> bool:
    """Whether a request costs its tenant nothing: it failed for a reason of the cluster's (5xx), or it failed before
    anything was sent, as one does that finds no room or whose client leaves the queue. Of a line of a batch nothing is
    sent before it is whole."""
    if outcome == LOST:
        return True
    if outcome in ERRORS_BY_CODE:
        return is_batch or not num_output or ERRORS_BY_CODE[outcome].http_status >= 500
    return False


def is_refused(error: BaseException | None, records: Sequence[RequestTrace], counted: UsageCounter) -> bool:
    """Whether no worker has had the request."""
    return error is not None and not (counted.num_tokens or any(record.choices for record in records))


class BegunRequest(NamedTuple):
    """A request that is being answered."""

    ask: TextRequest
    records: Sequence[RequestTrace]
    counted: UsageCounter
    endpoint: str
    key_id: str
    model: str


class RequestLedger:
    """`close` it at the end. `clock`: seconds since 1970."""

    def __init__(
        self,
        store: LedgerStore,
        prices: PriceList,
        fleet: FleetView,
        *,
        model: str,
        clock: Callable[[], float] = time.time,
        batches: RequestTraces | None = None,
        budgets: TenantBudgets | None = None,
    ) -> None:
        """`batches`: the records of the jobs of batches, for a ledger of theirs. `budgets` are kept up to date."""
        self.store = store
        self.prices = prices
        self._fleet = fleet
        self._model = model
        self._clock = clock
        self._batches = batches
        self._is_last = False
        self._is_stopped: Callable[[], bool] = lambda: False
        self._budgets = budgets
        self._open: dict[str, BegunRequest] = {}
        self._due_s: dict[str, float] = {}  # when the next note of an open request is made
        self._looks = 0
        self._latest = FleetMinute(minute=0, devices=0)
        self._counts = WorkerCounts()
        self._rates: dict[str, WorkerRate] = {}  # changed in place: a ledger of batches has it, too

    def of_batches(self, records: RequestTraces) -> RequestLedger:
        """The same for requests of batches: half the price, and no row for one that will run again."""
        ledger = copy.copy(self)
        ledger._batches, ledger._open, ledger._due_s = records, {}, {}
        return ledger

    def of_line(self, *, is_last: bool, is_stopped: Callable[[], bool]) -> RequestLedger:
        """The ledger of one attempt of a batch's line. `is_last`: the line does not run again, however the attempt
        ends. `is_stopped`: its batch was cancelled or has expired, so that an interrupted line does not run again."""
        ledger = copy.copy(self)
        ledger._is_last, ledger._is_stopped = is_last, is_stopped
        return ledger

    def most_usd(self, ask: TextRequest, model: str) -> float:
        """The most that a request may be charged: all of its prompts computed, and answers of `max_tokens`."""
        price = self.prices.price(model, self._clock(), parent=self._model)
        num_output = sum(job.sampling.max_tokens for job in ask.jobs)
        tokens = {"input": sum(map(len, ask.prompts)), "cached": 0, "output": num_output}
        return 0.0 if price is None else sum(price.charge(tokens, is_batch=self._batches is not None).values())

    def begun(
        self,
        ask: TextRequest,
        records: Sequence[RequestTrace],
        counted: UsageCounter,
        endpoint: str,
        key_id: str,
        model: str,
    ) -> None:
        """A request is being answered until `ended`: what it has come to is noted again and again, for the case that
        this process is killed. A line of a batch would run again. `model`: the served name, or that of an adapter."""
        if self._batches is None:
            self._open[ask.request_id] = BegunRequest(ask, records, counted, endpoint, key_id, model)
            self._due_s[ask.request_id] = loop_time() + LOOK_S

    def ended(
        self,
        ask: TextRequest,
        records: Sequence[RequestTrace],
        usage: Usage,
        endpoint: str,
        error: BaseException | None,
        key_id: str,
        model: str,
    ) -> None:
        """A request that began has ended, however it did."""
        if self._batches is not None:
            if error is not None and self._runs_again(error):
                return
            runs = self._batches.find(ask.jobs[0].group_id)
            records = [*records[:1], *(one for one in runs if one.choices)]
        self._open.pop(ask.request_id, None)
        self._due_s.pop(ask.request_id, None)
        row = self._row(ask, records, usage, endpoint, "ok" if error is None else code_of(error), key_id, model)
        self.store.write(row)
        if self._budgets is not None:
            self._budgets.add(ask.tenant, row.charged_usd)

    def _runs_again(self, error: BaseException) -> bool:
        """A line that is interrupted by the end of its process has not failed."""
        if not isinstance(error, Exception):
            return not self._is_stopped()
        return not self._is_last and isinstance(error, BatonError) and may_pass(error)

    def _row(
        self,
        ask: TextRequest,
        records: Sequence[RequestTrace],
        usage: Usage,
        endpoint: str,
        outcome: str,
        key_id: str,
        model: str,
    ) -> LedgerRow:
        now, loop_now = self._clock(), loop_time()
        seconds = loop_now - records[0].received_s if records else 0.0
        tokens = {
            "input": usage.prompt_tokens - usage.cached_tokens,
            "cached": usage.cached_tokens,
            "output": usage.completion_tokens,
        }
        work = work_of(records, tokens["input"], tokens["cached"], self._rates, loop_now)
        is_batch = self._batches is not None
        price = self.prices.price(model, now - seconds, parent=self._model)
        charged: Mapping[str, float] = _FREE
        if price is not None and not is_free(outcome, usage.completion_tokens, is_batch=is_batch):
            charged = price.charge(tokens, is_batch=is_batch)
        return LedgerRow(
            request_id=ask.request_id,
            at_s=now - seconds,
            seconds=seconds,
            tenant=ask.tenant.name,
            key_id=key_id,
            model=model,
            endpoint=endpoint,
            outcome=outcome,
            input_tokens=tokens["input"],
            cached_tokens=tokens["cached"],
            output_tokens=tokens["output"],
            reasoning_tokens=usage.reasoning_tokens,
            prefill_device_s=work.prefill_s,
            decode_device_s=work.decode_s,
            charged_usd=sum(charged.values()),
            batch=int(is_batch),
            accepted_tokens=work.num_accepted,
            cache_saved_device_s=work.cache_saved_s,
            speculation_saved_device_s=work.speculation_saved_s,
            drafted_tokens=work.num_drafted,
            prefill_kv_byte_s=work.prefill_kv_byte_s,
            decode_kv_byte_s=work.decode_kv_byte_s,
            price=price.version if price is not None else "",
            charged_input_usd=charged["input"],
            charged_cached_usd=charged["cached"],
            charged_output_usd=charged["output"],
        )

    def look(self) -> None:
        """Reads the workers' speeds, and writes down what is news of the fleet's devices and the workers' counts."""
        workers, minute = self._fleet.status(), int(self._clock() // 60)
        self._rates.clear()
        self._rates.update({one.worker_id: rate_of(one) for one in workers})
        seen = FleetMinute(minute=minute, devices=num_devices(workers), model=self._model)
        if seen.minute != self._latest.minute or seen.devices > self._latest.devices:
            self._latest = seen
            self.store.write(seen)
        for count in self._counts.look(workers, minute):
            self.store.write(count)

    def _write_counts(self) -> None:
        for count in self._counts.news():
            self.store.write(count)

    def note_open(self) -> None:
        """Writes down what the requests have come to whose next note is due."""
        now = loop_time()
        for request_id, one in self._open.items():
            if self._due_s[request_id] <= now:
                self._due_s[request_id] = now + NOTE_S - LOOK_S / 2  # looks are not made to the millisecond
                usage = one.counted.usage()
                row = self._row(one.ask, one.records, usage, one.endpoint, LOST, one.key_id, one.model)
                self.store.write(OpenRequest(row=row))

    async def follow(self) -> None:
        """Looks at the fleet again and again, also while nothing is requested. Runs until it is cancelled, and looks
        once more then."""
        try:
            while True:
                try:
                    self.look()
                    self.note_open()
                    if self._looks % READ_LOOKS == 0:
                        self._write_counts()
                        await asyncio.to_thread(self._read)
                except Unavailable:
                    pass  # the database logs it
                except Exception:  # a bug in one look: the next one follows
                    log.exception("the ledger misses a look at the fleet: internal error")
                self._looks += 1
                await asyncio.sleep(LOOK_S)
        finally:
            self.look()
            self._write_counts()

    def _read(self) -> None:
        """Reads what other processes have written: their charges, and the requests of those that were killed."""
        if self._budgets is not None:
            for period, span in self._budgets.spans().items():
                self._budgets.know(period, span, spent_by_tenant(self.store.database, int(span.start_s)))
        if self._looks % RECOVER_LOOKS == 0:
            if found := self.store.recover():
                log.warning("%d requests of a gateway process that was lost are counted as it left them", found)
            self.store.delete_old()

    def close(self) -> None:
        self.store.close()
