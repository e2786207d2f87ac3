"""Tokens that go past the generators: the same, in the same order, once, whatever happens to workers and clients."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence

import orjson
import pytest

from protos.errors import Internal
from protos.values import FinishReason, SequenceUpdate
from router.fleet.worker import WorkerState
from router.fleet.worker_client import Updates
from router.http.pace import Pace
from router.http.response_writer import Outlet
from router.http.sse import HOLE, EventStream, Voice, Way
from router.jobs import Tap
from tests.unit.router.fake_cluster import PROMPT, Cluster, job, served
from tests.unit.router.fake_worker import expected_tokens
from tests.unit.router.scripted import byte_level


class Reader:
    """Takes a job's tokens by its tap and by its deltas, in the order they come."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_tapped = 0
        self.takes = True
        self.tap = Tap(self.take, self.note)
        self._more = asyncio.Event()

    def take(self, token_ids: Sequence[int], now: float) -> bool:
        if self.takes:
            self.note(token_ids, now)
        return self.takes

    def note(self, token_ids: Sequence[int], now: float) -> None:
        self.tokens += token_ids
        self.num_tapped += len(token_ids)
        self._more.set()

    async def read(self, cluster: Cluster, max_tokens: int = 8) -> None:
        async for delta in cluster.generate(job(max_tokens=max_tokens), self.tap):
            self.tokens += delta.token_ids
            self._more.set()

    async def has(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.tokens) < count:
                self._more.clear()
                await self._more.wait()


@pytest.fixture
async def two(make: Callable[..., Cluster]) -> Cluster:
    cluster = make()
    await cluster.add("c0", "c1")
    return cluster


async def test_only_what_is_plain_is_tapped(two: Cluster) -> None:
    reader = Reader()
    await reader.read(two)
    assert reader.tokens == expected_tokens(PROMPT, 8)
    assert 0 < reader.num_tapped <= 6, "the first and the last token are deltas"


async def test_a_tap_may_refuse_and_loses_nothing(two: Cluster) -> None:
    reader = Reader()
    reader.takes = False
    await reader.read(two)
    assert reader.tokens == expected_tokens(PROMPT, 8)


async def test_a_death_in_mid_answer_after_tapped_tokens(two: Cluster) -> None:
    dying, other, reader = two["c0"], two["c1"], Reader()
    dying.pause_after = 5
    reading = asyncio.create_task(reader.read(two))
    await reader.has(5)
    await dying.die()
    await reading
    assert reader.num_tapped
    assert reader.tokens == expected_tokens(PROMPT, 8)
    assert other.submitted[0].output_ids == tuple(expected_tokens(PROMPT, 5)), "tapped tokens are in the journal"


async def test_a_sequence_that_is_tapped_still_leaves_a_worker_that_drains(two: Cluster) -> None:
    leaving, reader = two["c0"], Reader()
    leaving.pause_after = 3
    reading = asyncio.create_task(reader.read(two))
    await reader.has(3)
    leaving.drain()
    await two.until_state("c0", WorkerState.DRAINING)
    leaving.go(4)
    await leaving.until(lambda: bool(leaving.moved))
    await reading
    assert reader.tokens == expected_tokens(PROMPT, 8)


async def test_tokens_wait_for_a_reader_that_is_behind() -> None:
    updates, reader = Updates("r"), Reader()
    updates.tap = reader.tap
    updates.put_tokens((1,), 0.0)
    assert reader.tokens == [], "nobody waits for the next: what came before may not have been taken yet"
    assert (await anext(updates)).token_ids == (1,)
    waiting = asyncio.ensure_future(anext(updates))
    await asyncio.sleep(0)
    updates.put_tokens((2,), 0.0)
    updates.put(SequenceUpdate(request_id="r", token_ids=(3,), finish_reason=FinishReason.STOP))
    updates.put_tokens((4,), 0.0)
    assert (await waiting).token_ids == (3,)
    assert reader.tokens == [2]


async def test_a_bug_in_a_tap_fails_its_own_request_alone() -> None:
    updates = Updates("r")

    def broken(token_ids: Sequence[int], now: float) -> bool:
        raise KeyError("a bug")

    updates.tap = Tap(broken, Reader().note)
    waiting = asyncio.ensure_future(anext(updates))
    await asyncio.sleep(0)
    updates.put_tokens((1,), 0.0)
    with pytest.raises(Internal, match="KeyError"):
        await waiting


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "asked"), [
    ("completions", {"n": 1}),
    ("completions", {"n": 2, "stop": ["zz"]}),
    ("chat/completions", {"n": 1, "stream_options": {"include_usage": True}}),
])  # fmt: skip
async def test_a_stream_says_what_the_whole_answer_says(two: Cluster, path: str, asked: dict[str, object]) -> None:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": list(PROMPT)}
    body = {"model": "tiny", "max_tokens": 40, "temperature": 0, **prompt, **asked}
    async with served(two) as client:
        unstreamed = {key: body[key] for key in body if "stream" not in key}
        whole = (await client.post(f"/v1/{path}", json=unstreamed | {"return_token_ids": True})).json()  # by deltas
        brief = (await client.post(f"/v1/{path}", json=unstreamed)).json()
        answer = await client.post(f"/v1/{path}", json=body | {"stream": True})
    assert brief["usage"] == whole["usage"]
    for one, by_deltas in zip(brief["choices"], whole["choices"], strict=True):
        assert one == {key: by_deltas[key] for key in one}
    texts = [""] * len(whole["choices"])
    *lines, done = [line for line in answer.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    for line in lines:
        for choice in orjson.loads(line.removeprefix("data: "))["choices"]:
            assert choice.keys() - {"delta", "text"} == {"index", "logprobs", "finish_reason"}
            texts[choice["index"]] += choice.get("text", "") or choice.get("delta", {}).get("content", "")
    assert texts == [one.get("text") or one["message"]["content"] for one in whole["choices"]]


async def test_the_tokens_of_a_client_that_listens_go_straight_to_its_connection(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, written, real = make(), list[bytes](), Outlet.write
    await cluster.add("c0")
    cluster["c0"].pause_after = 1

    def note(outlet: Outlet, chunk: bytes) -> bool:
        sent = real(outlet, chunk)
        written.extend([chunk] * sent)
        return sent

    monkeypatch.setattr(Outlet, "write", note)
    says = byte_level().vocabulary.whole_text
    prompt = next(one for one in range(4, 512) if all(says(token_id) for token_id in expected_tokens((one,), 8)))
    body = {"model": "tiny", "prompt": [prompt], "max_tokens": 8, "temperature": 0, "stream": True}
    async with served(cluster) as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.aiter_lines()
        seen = [await anext(lines)]
        cluster["c0"].go()
        seen += [line async for line in lines]
    assert written
    assert set(b"".join(written).decode().split("\n\n")) <= {*seen, ""}


@pytest.mark.parametrize("asked", [{"stream": True}, {"stream": True, "n": 2}, {}])
async def test_an_answer_leaves_nothing_for_the_collector(two: Cluster, asked: dict[str, object]) -> None:
    """What is looked at by a collector of cycles costs a short request more than its JSON."""
    body = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}], **asked}

    def alive() -> int:
        return sum(issubclass(type(one), EventStream | Voice | Outlet) for one in gc.get_objects())

    async with served(two) as client:
        assert (await client.get("/health")).status_code == 200
        gc.collect()
        gc.disable()
        try:
            before = alive()
            for _ in range(3):
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            assert (await client.get("/health")).status_code == 200  # the connection knows its last request
            async with asyncio.timeout(20.0):
                while alive() > before:  # noqa: ASYNC110 - tasks that told of the end may still have to end themselves
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


async def test_a_late_gateway_says_several_texts_at_once() -> None:
    said: list[bytes] = []
    pace, clear = Pace(), True

    class Watched(Way):
        def put(self, chunk: bytes, now: float) -> bool:
            said.extend([chunk] * (clear and chunk != b""))
            return clear

    voice = Voice(lambda index: {"i": index, "text": HOLE}, Watched(), pace)
    assert voice.say(0, "a", 1, 10.0)
    pace.gap_s = 0.05
    with pace.running():
        for text, now in (("b", 10.1), ("c", 10.11), ('"', 10.12), ("e", 10.16)):
            assert voice.say(0, text, 1, now)
        assert [orjson.loads(chunk.removeprefix(b"data: "))["text"] for chunk in said] == ["a", "b", 'c"e']
        voice.say(0, "f", 1, 10.17)
        assert orjson.loads(voice.held().removeprefix(b"data: ")) == {"i": 0, "text": "f"}
        assert voice.held() == b"", "said once"
        assert voice.say(0, "g", 1, 10.18)
        clear = False  # the client reads too slowly: what comes is a delta, which waits for it
        assert not voice.say(0, "h", 1, 10.19)
        assert not voice.say(0, "h", 1, 11.0)
        assert orjson.loads(voice.held().removeprefix(b"data: ")) == {"i": 0, "text": "g"}
        assert not voice.say(0, "h", 1, 12.0)
