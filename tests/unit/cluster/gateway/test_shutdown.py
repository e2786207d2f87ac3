"""A gateway that stops tells those it has not finished with, and only those."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from cluster.gateway.shutdown import Cutoff
from protos.errors import Unavailable
from protos.values import SamplingParams
from router.jobs import Job, TokenDelta

JOB = Job(request_id="r", group_id="g", prompt_ids=(1,), sampling=SamplingParams())


class Model:
    """Gives one token, then thinks forever."""

    def __init__(self) -> None:
        self.thinking = asyncio.Event()
        self.aborted = False

    async def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        try:
            yield TokenDelta(token_ids=(7,))
            self.thinking.set()
            await asyncio.Event().wait()
        finally:
            self.aborted = True


async def read(generate: Cutoff) -> tuple[list[TokenDelta], str]:
    """The tokens of a client, and its error's message; it can continue afterwards."""
    seen: list[TokenDelta] = []
    try:
        async with aclosing(generate(JOB)) as deltas:
            async for delta in deltas:
                seen += [delta]
    except Unavailable as error:
        await asyncio.sleep(0)
        return seen, error.message
    return seen, ""


async def test_an_interrupted_stream_ends_with_a_typed_error() -> None:
    model = Model()
    generate = Cutoff(model)
    reading = asyncio.create_task(read(generate))
    await model.thinking.wait()
    generate.cut()
    tokens, message = await reading
    assert tokens == [TokenDelta(token_ids=(7,))]
    assert "stopping" in message
    assert model.aborted


async def test_nothing_new_runs_after_the_cut() -> None:
    model = Model()
    generate = Cutoff(model)
    generate.cut()
    tokens, message = await read(generate)
    assert tokens == []
    assert "stopping" in message


async def test_a_client_that_leaves_is_still_a_cancellation() -> None:
    model = Model()
    reading = asyncio.create_task(read(Cutoff(model)))
    await model.thinking.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert model.aborted
