"""Runs a worker that waits for the modelled time of a step instead of computing it, over the real protocol.

    python -m benchmarks.gateway.paced_worker --name w0       prints its address, serves until it is killed

Several of them, a gateway and a load client fit on two cores. A step decodes one token for each running request and
prefills prompts in their order with the rest of its tokens. It takes `step_s`, and more for each prefilled token and
each decoded sequence. Steps follow each other by the clock: a step that a busy machine begins late is shorter, so that
the worker keeps its pace; it reports the speed that it really had. There is a block for 16 tokens; a request without a
free block waits. Nothing is ever found cached.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import uvloop

from benchmarks.gateway.stub_worker import LAYOUT, TOKENS, StubWorker, serve
from protos.values import (
    FinishReason,
    GenerateRequest,
    KVEvents,
    SequenceUpdate,
    StepMessage,
    WorkerInfo,
    WorkerLoad,
)
from protos.wire import from_proto, to_proto

KEEP = 0.9
"""Of what was measured, with every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """With these, prompts of 320 tokens and answers of 32, a worker does nine requests a second."""

    step_s: float = 0.01
    token_s: float = 0.0002
    sequence_s: float = 0.0005
    tokens_a_step: int = 128
    max_running: int = 32
    num_blocks: int = 1500

    def __call__(self, num_read: int, num_writing: int) -> float:
        return self.step_s + num_read * self.token_s + num_writing * self.sequence_s


@dataclass(slots=True, eq=False, kw_only=True)
class PacedSequence:
    request: GenerateRequest
    num_unread: int
    num_made: int = 0

    @property
    def num_blocks(self) -> int:
        tokens = len(self.request.prompt_ids) + self.request.sampling.max_tokens
        return -(-tokens // LAYOUT.block_size)


@dataclass(slots=True, kw_only=True)
class PacedStep:
    """A step: who writes, and who has how much read."""

    writing: list[PacedSequence]
    reading: list[tuple[PacedSequence, int]]

    @property
    def num_read(self) -> int:
        return sum(count for _, count in self.reading)


@dataclass(slots=True)
class PacedEngine:
    """Waiting and running sequences. Pure: the caller decides when a step ends."""

    pace: StepCost
    waiting: deque[PacedSequence] = field(default_factory=deque)
    running: dict[str, PacedSequence] = field(default_factory=dict)
    num_free: int = 0
    num_steps: int = 0
    read: tuple[float, float] = (0.0, 0.0)  # tokens, and their seconds, of late
    wrote: tuple[float, float] = (0.0, 0.0)  # steps, and theirs

    def __post_init__(self) -> None:
        self.num_free = self.pace.num_blocks

    def submit(self, request: GenerateRequest) -> None:
        self.waiting.append(PacedSequence(request=request, num_unread=len(request.prompt_ids)))

    def abort(self, request_id: str) -> None:
        self.waiting = deque(one for one in self.waiting if one.request.request_id != request_id)
        if (gone := self.running.pop(request_id, None)) is not None:
            self.num_free += gone.num_blocks

    def plan(self) -> PacedStep:
        while self.waiting and len(self.running) < self.pace.max_running:
            if self.waiting[0].num_blocks > self.num_free:
                break
            begun = self.waiting.popleft()
            self.num_free -= begun.num_blocks
            self.running[begun.request.request_id] = begun
        plan, left = PacedStep(writing=[], reading=[]), self.pace.tokens_a_step
        for one in self.running.values():
            if not one.num_unread:
                plan.writing.append(one)
            elif left:
                count = min(left, one.num_unread)
                plan.reading.append((one, count))
                left -= count
        return plan

    def apply(self, plan: PacedStep, seconds: float) -> StepMessage:
        """The step is over: what it made, and the load from here."""
        self.num_steps += 1
        if plan.num_read:
            share = plan.num_read / (plan.num_read + len(plan.writing))
            self.read = (self.read[0] * KEEP + plan.num_read, self.read[1] * KEEP + seconds * share)
        if plan.writing:
            self.wrote = (self.wrote[0] * KEEP + 1, self.wrote[1] * KEEP + seconds)
        made = list(plan.writing)
        for one, count in plan.reading:
            one.num_unread -= count
            if not one.num_unread:
                made.append(one)
        updates = [self._write(one) for one in made if one.request.request_id in self.running]
        return StepMessage(updates=tuple(updates), load=self.load())

    def _write(self, one: PacedSequence) -> SequenceUpdate:
        one.num_made += 1
        request_id, reason = one.request.request_id, None
        if one.num_made == one.request.sampling.max_tokens:
            reason = FinishReason.LENGTH
            del self.running[request_id]
            self.num_free += one.num_blocks
        token_id = TOKENS[one.num_made % len(TOKENS)]
        return SequenceUpdate(request_id=request_id, token_ids=(token_id,), finish_reason=reason)

    def load(self) -> WorkerLoad:
        unread = sum(one.num_unread for one in (*self.waiting, *self.running.values()))
        return WorkerLoad(
            step=self.num_steps,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            queued_prefill_tokens=unread,
            num_free_blocks=self.num_free,
            num_blocks=self.pace.num_blocks,
            prefill_tokens_per_s=self.read[0] / self.read[1] if self.read[1] else 0.0,
            decode_step_s=self.wrote[1] / self.wrote[0] if self.wrote[0] else 0.0,
        )


class PacedWorker(StubWorker):
    """For one gateway."""

    def __init__(self, name: str, pace: StepCost) -> None:
        super().__init__(pace.step_s)
        self._name = name
        self._pace = pace

    def info(self) -> WorkerInfo:
        stub = super().info()
        lane = replace(stub.lane, worker_id=self._name)
        return replace(stub, worker_id=self._name, lane=lane, num_blocks=self._pace.num_blocks, reads_further=False)

    async def Stream(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        engine, arrived, greeted = PacedEngine(self._pace), asyncio.Event(), asyncio.Event()

        async def read() -> None:
            async for message in messages:
                match message.WhichOneof("message"):
                    case "hello":
                        greeted.set()
                    case "submit":
                        engine.submit(from_proto(GenerateRequest, message.submit))
                        arrived.set()
                    case "abort":
                        for request_id in message.abort.request_ids:
                            engine.abort(request_id)

        reading, clock = asyncio.create_task(read()), asyncio.get_running_loop().time
        try:
            await greeted.wait()
            events = KVEvents(incarnation=1, first_seq=0, events=(), snapshot=True)
            yield to_proto(StepMessage(events=(events,), load=engine.load()))
            due_s = began_s = clock()
            while True:
                plan = engine.plan()
                if not plan.writing and not plan.reading:
                    arrived.clear()
                    await arrived.wait()
                    due_s = began_s = clock()
                    continue
                due_s += self._pace(plan.num_read, len(plan.writing))
                await asyncio.sleep(max(0.0, due_s - clock()))
                ended_s = clock()
                yield to_proto(engine.apply(plan, ended_s - began_s))
                began_s = ended_s
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="paced-0")
    uvloop.run(serve(PacedWorker(parser.parse_args().name, StepCost())))
