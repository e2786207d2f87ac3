"""Makes the rows of a gateway: one for each request that has ended, and the fleet's devices of each minute."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from protos.errors import ERRORS_BY_CODE, Unavailable
from protos.event_loop import loop_time
from router.auth.budgets import TenantBudgets
from router.jobs import FleetView
from router.observe.ledger.costing import WorkerRate, num_devices, rate_of, work_of
from router.observe.ledger.ledger_report import spent_by_tenant
from router.observe.ledger.ledger_store import LedgerStore
from router.observe.ledger.ledger_tables import LOST
from router.observe.ledger.prices import KINDS, PriceList
from router.observe.ledger.rows import FleetMinute, LedgerRow, OpenRequest
from router.observe.ledger.worker_counts import WorkerCounts
from router.observe.request_observer import EndedRequest, ObservedRequest
from router.text.text_stream import Usage

log = logging.getLogger("baton.ledger")

LOOK_S = 1.0
"""Age of the speeds by which a request's device seconds are estimated, at most."""
NOTE_S = 2.0
"""Between two notes of a request that is being answered; the first is made after `LOOK_S`."""
READ_LOOKS, RECOVER_LOOKS = 5, 30
"""How often, in looks, the sums of budgets are read and workers' counts written; lost processes looked for, and rows
deleted that are old."""


_FREE = dict.fromkeys(KINDS, 0.0)


def is_free(outcome: str, num_output: int, *, is_batch: bool) -> bool:
    """A request is free if the cluster failed (5xx) or nothing was sent. A batch's line is sent only when it is
    whole."""
    if outcome == LOST:
        return True
    if outcome in ERRORS_BY_CODE:
        return is_batch or not num_output or ERRORS_BY_CODE[outcome].http_status >= 500
    return False


class RequestLedger:
    """The observer that writes a row for each request; `close` it at the end."""

    def __init__(
        self,
        store: LedgerStore,
        prices: PriceList,
        fleet: FleetView,
        *,
        model: str,
        clock: Callable[[], float] = time.time,
        budgets: TenantBudgets | None = None,
    ) -> None:
        self.store = store
        self.prices = prices
        self._fleet = fleet
        self._model = model
        self._clock = clock
        self._budgets = budgets
        self._open: dict[str, tuple[ObservedRequest, float]] = {}  # with the time of the next note
        self._looks = 0
        self._latest = FleetMinute(minute=0, devices=0)
        self._counts = WorkerCounts()
        self._rates: dict[str, WorkerRate] = {}

    def most_usd(self, request: ObservedRequest) -> float:
        """The most that a request may be charged: all of its prompts computed, and answers of `max_tokens`."""
        ask, price = request.ask, self.prices.price(request.model, self._clock(), parent=self._model)
        num_output = sum(job.sampling.max_tokens for job in ask.jobs)
        tokens = {"input": sum(map(len, ask.prompts)), "cached": 0, "output": num_output}
        return 0.0 if price is None else sum(price.charge(tokens, is_batch=request.is_batch).values())

    def began(self, request: ObservedRequest) -> None:
        """Writes notes of the request until it ends, in case this process is killed. A batch's line has none: it runs
        again."""
        if not request.is_batch:
            self._open[request.ask.request_id] = request, loop_time() + LOOK_S

    def ended(self, ended: EndedRequest) -> None:
        self._open.pop(ended.request.ask.request_id, None)
        row = self._row(ended.request, ended.usage, ended.outcome)
        self.store.write(row)
        if self._budgets is not None:
            self._budgets.add(ended.request.ask.tenant, row.charged_usd)

    def _row(self, request: ObservedRequest, usage: Usage, outcome: str) -> LedgerRow:
        ask, records, is_batch = request.ask, request.records, request.is_batch
        now, loop_now = self._clock(), loop_time()
        seconds = loop_now - records[0].received_s if records else 0.0
        tokens = {
            "input": usage.prompt_tokens - usage.cached_tokens,
            "cached": usage.cached_tokens,
            "output": usage.completion_tokens,
        }
        work = work_of(records, tokens["input"], tokens["cached"], self._rates, loop_now)
        price = self.prices.price(request.model, now - seconds, parent=self._model)
        charged: Mapping[str, float] = _FREE
        if price is not None and not is_free(outcome, usage.completion_tokens, is_batch=is_batch):
            charged = price.charge(tokens, is_batch=is_batch)
        return LedgerRow(
            request_id=ask.request_id,
            at_s=now - seconds,
            seconds=seconds,
            tenant=ask.tenant.name,
            key_id=request.key_id,
            model=request.model,
            endpoint=request.endpoint,
            outcome=outcome,
            input_tokens=tokens["input"],
            cached_tokens=tokens["cached"],
            output_tokens=tokens["output"],
            reasoning_tokens=usage.reasoning_tokens,
            charged_usd=sum(charged.values()),
            batch=int(is_batch),
            price=price.version if price is not None else "",
            charged_input_usd=charged["input"],
            charged_cached_usd=charged["cached"],
            charged_output_usd=charged["output"],
            **vars(work),
        )

    def look(self) -> None:
        """Reads the workers' speeds and writes new device and token counts."""
        workers, minute = self._fleet.status(), int(self._clock() // 60)
        self._rates.clear()
        self._rates.update({worker.worker_id: rate_of(worker) for worker in workers})
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
        now = loop_time()
        for request_id, (request, due_s) in self._open.items():
            if due_s <= now:
                self._open[request_id] = request, now + NOTE_S - LOOK_S / 2  # looks are not made to the millisecond
                self.store.write(OpenRequest(row=self._row(request, request.counted.usage(), LOST)))

    async def follow(self) -> None:
        """Looks every `LOOK_S` until it is cancelled, and once more then."""
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
                except Exception:  # a bug in one turn must not end the others
                    log.exception("the ledger misses a look at the fleet: internal error")
                self._looks += 1
                await asyncio.sleep(LOOK_S)
        finally:
            self.look()
            self._write_counts()

    def _read(self) -> None:
        """Reads other processes' charges and the requests of killed ones."""
        if self._budgets is not None:
            for period, span in self._budgets.spans().items():
                self._budgets.know(period, span, spent_by_tenant(self.store.database, int(span.start_s)))
        if self._looks % RECOVER_LOOKS == 0:
            if num_lost := self.store.recover():
                log.warning("%d requests of a gateway process that was lost are counted as it left them", num_lost)
            self.store.delete_old()

    def close(self) -> None:
        self.store.close()
