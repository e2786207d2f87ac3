"""A whole engine around the toy model, with the parts in reach, and answers put together from its updates."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvtransfer.events import EventLog
from protos.values import ErrorInfo, FinishReason, GenerateRequest, Logprobs, SamplingParams, SequenceUpdate
from tests.unit.workers.sync_pipeline import Runner, SyncPipeline
from tests.unit.workers.toy import ToyRunner, toy_kv, toy_tokens
from workers.batch import Batch, PendingStep, RowLimits, StepOutput
from workers.engine.engine import Engine
from workers.grammar.grammar_seam import Grammars
from workers.kv.block_pool import BlockPool
from workers.kv.host import FinishedOnload, HostPool
from workers.scheduling.request import Request
from workers.scheduling.role import Disposition, Role, Tick
from workers.scheduling.scheduler import Scheduler
from workers.speculation.speculation import Speculation
from workers.worker_config import SchedulerConfig

WEIGHT = 5
VOCAB = 997
BLOCK = 4


def ask(request_id: str, prompt_ids: Any, max_tokens: int = 8, **changes: Any) -> GenerateRequest:
    """A greedy request; `changes` go to the request or to its sampling parameters, whichever knows the name."""
    own = {name: changes.pop(name) for name in tuple(changes) if name in GenerateRequest.__dataclass_fields__}
    sampling = SamplingParams(**({"temperature": 0.0} | changes | {"max_tokens": max_tokens}))
    return GenerateRequest(request_id=request_id, prompt_ids=tuple(prompt_ids), sampling=sampling, **own)


def by_hand(prompt_ids: Any, num_tokens: int, **changes: Any) -> tuple[int, ...]:
    return toy_tokens(tuple(prompt_ids), num_tokens, **({"weight": WEIGHT, "vocab_size": VOCAB} | changes))


@dataclass
class Answer:
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    cached: list[int] = field(default_factory=list)

    def add(self, update: SequenceUpdate) -> None:
        assert self.finish_reason in (None, FinishReason.PREFILLED), "told after the end"
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        self.prompt_logprobs += update.prompt_logprobs
        self.finish_reason = update.finish_reason
        self.error = update.error
        self.cached.append(update.num_cached_tokens)


class AtLast:
    """A pipeline that computes nothing before it must: what is freed or overwritten too early shows in the tokens."""

    def __init__(self, runner: Runner) -> None:
        self._runner = SyncPipeline(runner)
        self._launched: deque[_Queued] = deque()

    @property
    def row_limits(self) -> RowLimits:
        return self._runner.row_limits

    def launch(self, batch: Batch) -> PendingStep:
        self._launched.append(_Queued(self, batch))
        return self._launched[-1]

    def compute(self, queued: _Queued) -> StepOutput:
        assert self._launched.popleft() is queued, "steps are fetched in the order of their launches"
        return self._runner.launch(queued.batch).fetch()


@dataclass(slots=True, eq=False)
class _Queued:
    pipeline: AtLast
    batch: Batch

    def fetch(self) -> StepOutput:
        return self.pipeline.compute(self)


class ToyCopies:
    """Blocks of a toy runner on the host. A load takes so many looks at it (`patience`); until then, or until it is
    settled, its blocks hold nonsense, which shows in the tokens of whoever reads them."""

    def __init__(self, runner: ToyRunner, patience: int = 0) -> None:
        self.blocks_per_s = 1e9
        self.patience = patience
        self.num_stowed = 0
        self._runner = runner
        self._slots: dict[int, Any] = {}
        self._loads: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        self._looks: dict[int, int] = {}

    def offload(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        being_loaded = {slot for slots, _ in self._loads.values() for slot in slots}
        assert not being_loaded & set(slots), "a slot is overwritten while it is loaded"
        self._slots |= dict(zip(slots, self._runner.gather(block_ids), strict=True))
        self.num_stowed += len(slots)

    def onload(self, load_id: int, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        self._runner.scatter(block_ids, self._runner.gather(block_ids) * 0 - 7)
        self._loads[load_id], self._looks[load_id] = (slots, block_ids), 0

    def finished(self) -> list[FinishedOnload]:
        over = [load_id for load_id, looks in self._looks.items() if looks >= self.patience]
        for load_id in over:
            del self._looks[load_id]
        self._looks = {load_id: looks + 1 for load_id, looks in self._looks.items()}
        return [FinishedOnload(load_id=load_id, elapsed_s=0.125) for load_id in over]

    def await_copy(self, load_id: int) -> None:
        slots, block_ids = self._loads.pop(load_id)
        for slot, block_id in zip(slots, block_ids, strict=True):
            self._runner.scatter([block_id], self._slots[slot][None])


class ToyEngine:
    """Steps are a second apart; after each the engine's integrity is checked.

    Of `depth` 0 it computes each step at once, else each as late as it can.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        role: Role | None = None,
        log_capacity: int = 1000,
        depth: int = 0,
        host_slots: int = 0,
        grammars: Grammars | None = None,
        speculation: Speculation | None = None,
        **config: Any,
    ):
        self.log = EventLog(incarnation=1, capacity=log_capacity)
        self.runner = ToyRunner(WEIGHT, BLOCK, VOCAB, grammars)
        self.copies = ToyCopies(self.runner)
        self.host = HostPool(host_slots, self.copies, self.log.record, block_bytes=1) if host_slots else None
        self.pool = BlockPool(num_blocks, BLOCK, self.log.record, host=self.host)
        settings = {"max_model_len": 10_000, "vocab_size": VOCAB, "time_slice_s": math.inf} | config
        self.scheduler = Scheduler(SchedulerConfig(**settings), self.pool, role or Role(), speculation=speculation)
        ticks = count()
        runner = AtLast(self.runner) if depth else SyncPipeline(self.runner)
        self.engine = Engine(
            self.scheduler,
            runner,
            events=self.log,
            clock=lambda: float(next(ticks)),
            depth=depth,
            grammars=grammars,
        )
        self.now = 0.0
        self.answers: dict[str, Answer] = defaultdict(Answer)

    def submit(self, *requests: GenerateRequest) -> None:
        for request in requests:
            self.engine.submit(request, self.now)

    def step(self, num_steps: int = 1) -> list[SequenceUpdate]:
        updates: list[SequenceUpdate] = []
        for _ in range(num_steps):
            self.now += 1.0
            fresh = self.engine.step(self.now)
            for update in fresh:
                self.answers[update.request_id].add(update)
            updates += fresh
            self.engine.check_integrity(self.reserved_ids())
        return updates

    def reserved_ids(self) -> list[int]:
        role = self.scheduler.role
        return role.reserved_ids if isinstance(role, Adopting) else []

    def finish(self) -> dict[str, Answer]:
        """Steps until nothing is left, and proves that nothing is."""
        for _ in range(10_000):
            if not self.engine.has_work():
                self.engine.assert_idle()
                return self.answers
            self.step()
        raise AssertionError("the engine does not come to an end")

    def serve(self, *requests: GenerateRequest) -> dict[str, Answer]:
        self.submit(*requests)
        return self.finish()


class Handing(Role):
    """A role that hands every request over after its first token, and says so in `held`."""

    def __init__(self, disposition: Disposition) -> None:
        self.disposition = disposition
        self.next_tick = Tick()
        self.held: list[str] = []
        self.forgotten: list[str] = []

    def after_prefill(self, request: Request) -> Disposition:
        if self.disposition is Disposition.HOLD:
            self.held.append(request.request_id)
        return self.disposition

    def drop(self, request: Request) -> None:
        self.forgotten.append(request.request_id)

    def tick(self, now: float, num_in_flight: int) -> Tick:
        tick, self.next_tick = self.next_tick, Tick()
        return tick


class Adopting(Role):
    """A role that reserves blocks for some requests, as a decode pool does, and hands them over once `arrived`."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}
        self.arrived: set[str] = set()
        self.pool: BlockPool | None = None

    def reserve(self, toy: ToyEngine, request_id: str, prompt_ids: Sequence[int]) -> bool:
        """Reserves blocks for a prompt, and lets its KV arrive in them."""
        self.pool = toy.pool
        block_ids = toy.pool.allocate(toy.pool.blocks_for(len(prompt_ids)))
        if block_ids is None:
            return False
        content = toy.runner.gather(block_ids)
        for position, token_id in enumerate(prompt_ids):
            content[position // toy.pool.block_size, position % toy.pool.block_size] = toy_kv(token_id, position)
        toy.runner.scatter(block_ids, content)
        self.blocks[request_id] = block_ids
        return True

    @property
    def reserved_ids(self) -> list[int]:
        return [block_id for block_ids in self.blocks.values() for block_id in block_ids]

    def admissible(self, request: Request, now: float) -> bool:
        assert not request.adopted, "asked again although it adopted its blocks"
        assert request.num_preemptions == 0, "asked again although it ran before"
        if request.request_id in self.blocks:
            if request.request_id not in self.arrived:
                return False
            request.block_ids = self.blocks.pop(request.request_id)
            request.num_computed = request.num_prompt
            request.adopted = True
        return True

    def drop(self, request: Request) -> None:
        if request.request_id in self.blocks:
            assert self.pool is not None
            self.pool.release(self.blocks.pop(request.request_id))
