"""Tokens that sinks take: the same, in the same order, once, whatever happens to workers and clients."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import orjson
import pytest

from router.fleet.member import WorkerState
from router.fleet.worker_client import Updates
from router.http.pace import Pace
from router.http.protocol import ResponseChannel, WriteState
from router.http.sse import ChoiceEvents, EventStream, SseWriter
from router.streaming.itl_histogram import ChoiceTimes, ItlHistogram
from router.streaming.token_sink import TokenSink, compiled
from router.text.vocabulary import TokenColumns
from tests.unit.router.fake_cluster import PROMPT, Cluster, job, served
from tests.unit.router.fake_worker import expected_tokens
from tests.unit.router.scripted import byte_level

pytestmark = pytest.mark.skipif(compiled() is None, reason="needs a C compiler")


class Reader:
    """Reads a job whose sink takes every token that it may, or none; a token's text is its number."""

    def __init__(self, *, takes: bool = True) -> None:
        texts = TokenColumns([f"{token_id}" if takes else None for token_id in range(2048)], frozenset())
        self.tokens: list[int] = []
        self.num_taken = 0
        self.state = WriteState()
        self.sink = TokenSink(texts, ChoiceTimes(ItlHistogram(())), Pace(), self)
        self._more = asyncio.Event()

    def write(self, chunk: bytes) -> None:
        self.num_taken += 1
        self.tokens.append(int(chunk.split(b"\r\n")[1]))
        self._more.set()

    def make_clear(self) -> bool:
        return True

    def frame(self, *, is_reasoning: bool) -> list[bytes]:
        return [b"", b""]

    async def read(self, cluster: Cluster, max_tokens: int = 8) -> None:
        asked = job(max_tokens=max_tokens)
        asked.client.sink = self.sink
        async for delta in cluster.generate(asked):
            self.tokens += delta.token_ids[self.sink.num_taken_of(len(delta.token_ids)) :]
            self._more.set()

    async def has(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.tokens) < count:
                self._more.clear()
                await self._more.wait()


@pytest.fixture
async def two(make: Callable[..., Cluster]) -> Cluster:
    cluster = make()
    await cluster.add("c0", "c1")
    return cluster


async def test_a_sink_takes_plain_tokens_only(two: Cluster) -> None:
    reader = Reader()
    await reader.read(two)
    assert reader.tokens == expected_tokens(PROMPT, 8)
    assert 0 < reader.num_taken <= 6, "the first and the last token are deltas"


async def test_a_sink_may_refuse_and_loses_nothing(two: Cluster) -> None:
    reader = Reader(takes=False)
    await reader.read(two)
    assert reader.tokens == expected_tokens(PROMPT, 8)
    assert not reader.num_taken


async def test_a_death_in_mid_answer_after_taken_tokens(two: Cluster) -> None:
    dying, other, reader = two["c0"], two["c1"], Reader()
    dying.pause_after = 5
    reading = asyncio.create_task(reader.read(two))
    await reader.has(5)
    await dying.die()
    await reading
    assert reader.num_taken
    assert reader.tokens == expected_tokens(PROMPT, 8)
    assert other.submitted[0].output_ids == tuple(expected_tokens(PROMPT, 5)), "taken tokens are in the journal"


async def test_a_sequence_with_a_sink_leaves_a_draining_worker(two: Cluster) -> None:
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


# -- over HTTP ---------------------------------------------------------------------------------------------------------


async def test_named_events_of_messages_are_written_by_the_sink(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"model": "tiny", "max_tokens": 40, "temperature": 0, "messages": [{"role": "user", "content": "hi"}]}
    taken, report = list[int](), TokenSink.report

    def note(sink: TokenSink, now: float) -> tuple[int, ...]:
        result = report(sink, now)
        taken.append(len(result))
        return result

    monkeypatch.setattr(TokenSink, "report", note)
    async with served(two) as client:
        whole = (await client.post("/v1/messages", json=asked)).json()
        taken.clear()
        answer = await client.post("/v1/messages", json=asked | {"stream": True})
    events = [orjson.loads(line.partition("\ndata: ")[2]) for line in answer.text.split("\n\n") if line]
    kinds = [event["type"] for event in events]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert sum(taken) > 0, "compiled code writes them"
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert {"type": "text", "text": text} == whole["content"][0]
    assert events[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize(("path", "asked"), [
    ("completions", {"n": 1}),
    ("completions", {"n": 2, "stop": ["zz"]}),
    ("chat/completions", {"n": 1, "stream_options": {"include_usage": True}}),
])  # fmt: skip
async def test_a_stream_equals_the_whole_answer(two: Cluster, path: str, asked: dict[str, object]) -> None:
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
    assert texts == [choice.get("text") or choice["message"]["content"] for choice in whole["choices"]]


async def test_a_reading_clients_tokens_go_straight_to_its_socket(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, opened, real = make(), list[bool](), ChoiceEvents.make_clear
    await cluster.add("c0")
    cluster["c0"].pause_after = 1

    def note(events: ChoiceEvents) -> bool:
        opened.append(real(events))
        return opened[-1]

    monkeypatch.setattr(ChoiceEvents, "make_clear", note)
    says = byte_level().vocabulary.whole_text
    prompt = next(
        number for number in range(4, 512) if all(says(token_id) for token_id in expected_tokens((number,), 8))
    )
    body = {"model": "tiny", "prompt": [prompt], "max_tokens": 8, "temperature": 0, "stream": True}
    async with served(cluster) as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.aiter_lines()
        seen = [await anext(lines)]
        cluster["c0"].go()
        seen += [line async for line in lines]
    assert any(opened)
    told = [orjson.loads(line.removeprefix("data: ")) for line in seen if line and not line.endswith("[DONE]")]
    assert [chunk["choices"][0]["text"] for chunk in told] == [
        says(token_id) for token_id in expected_tokens((prompt,), 8)
    ]


@pytest.mark.parametrize("asked", [{"stream": True}, {"stream": True, "n": 2}, {}])
async def test_an_answer_leaves_nothing_for_the_collector(two: Cluster, asked: dict[str, object]) -> None:
    """Garbage collection costs a short request more than its JSON."""
    body = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}], **asked}

    def alive() -> int:
        return sum(
            issubclass(type(item), EventStream | SseWriter | TokenSink | ResponseChannel) for item in gc.get_objects()
        )

    async with served(two) as client:
        gc.collect()
        suite_froze = gc.get_freeze_count() > 0
        gc.freeze()  # what other tests have left is not listed
        assert (await client.get("/health")).status_code == 200
        gc.collect()
        gc.disable()
        try:
            before = alive()
            for _ in range(3):
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            assert (await client.get("/health")).status_code == 200  # the connection knows its last request
            async with asyncio.timeout(60.0):
                while alive() > before:  # noqa: ASYNC110 - tasks that told of the end may still have to end themselves
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()
            if not suite_froze:  # forked_runner.py
                gc.unfreeze()


def spoken() -> tuple[int, str]:
    """A prompt whose first ten tokens are whole characters, and its text."""
    says = byte_level().vocabulary.whole_text
    for prompt in range(4, 512):
        texts = [text for token in expected_tokens((prompt,), 10) if (text := says(token)) is not None]
        if len(texts) == 10 and texts[0] and texts[-1]:
            return prompt, "".join(texts)
    raise AssertionError("no prompt is like that")


async def test_another_worker_continues_after_all_written_tokens(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, reported, real = make(), list[int](), Updates.report

    def report(updates: Updates) -> bool:
        is_any = real(updates)
        reported.extend([1] * is_any)
        return is_any

    monkeypatch.setattr(Updates, "report", report)
    await cluster.add("c0", "c1")
    other, dying = cluster["c0"], cluster["c1"]
    prompt, told = spoken()
    body = {"model": "tiny", "prompt": [prompt], "max_tokens": 20, "temperature": 0}
    async with served(cluster) as client:
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        other.submitted.clear()
        dying.go(10)
        said, usage = "", None
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=asked) as answer:
            async for line in answer.aiter_lines():
                if not line or line.endswith("[DONE]"):
                    continue
                event = orjson.loads(line.removeprefix("data: "))
                usage = event["usage"]
                said += "".join(choice["text"] for choice in event["choices"])
                if said == told:
                    await dying.die()
    assert said == whole
    assert usage is not None
    assert usage["completion_tokens"] == 20
    assert [sequence.output_ids for sequence in other.submitted] == [tuple(expected_tokens((prompt,), 10))]
    assert reported, "a sink was open"


async def test_a_client_that_leaves_while_a_sink_is_open(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0")
    cluster["c0"].pause_after = 10
    body = {"model": "tiny", "prompt": [spoken()[0]], "max_tokens": 20, "temperature": 0, "stream": True}
    async with served(cluster) as client:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_lines())
        await cluster["c0"].until(lambda: bool(cluster["c0"].aborted))
        cluster["c0"].go()
        await asyncio.sleep(0)
    assert cluster["c0"].aborted
