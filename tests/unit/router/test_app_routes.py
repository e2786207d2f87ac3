"""The HTTP face besides OpenAI's API: health, metrics, bad requests of every kind, and going away."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from protos.errors import Overloaded
from protos.release import VERSION
from router.jobs import TokenDelta
from router.request_metrics import RequestMetrics
from tests.unit.router.scripted import Crew, Script, Scripted, Worker, ids_of, make_gateway, saying, serving

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "tiny", "prompt": "hello"}
PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]


@asynccontextmanager
async def visiting(script: Script | None = None, **changes: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Scripted]]:
    generate = Scripted(script or saying("hi"))
    gateway = make_gateway(generate, **changes)
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, verify=False, timeout=60) as client:
        yield client, generate


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return dict(body["error"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "The body is empty"),
        (b"{", "not valid JSON"),
        (b'{"model": NaN}', "not valid JSON"),
        (b'{"model": "\xff"}', "not valid JSON"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "nested"),
        (b"[]", "must be a JSON object, not an empty list"),
        (b"null", "must be a JSON object, not null"),
        (b'"text"', "must be a JSON object, not the string 'text'"),
    ],
)
async def test_a_body_that_is_no_request_is_refused(path: str, content: bytes, told: str) -> None:
    async with visiting() as (client, _):
        response = await client.post(path, content=content)
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert told in error["message"]


async def test_a_body_over_the_limit_is_refused_before_it_is_sent() -> None:
    async with visiting(max_body_bytes=1024) as (client, _):
        response = await client.post("/v1/completions", content=b"x" * 1025)
        assert (await client.post("/v1/completions", content=b"x" * 1024)).status_code == 400
    assert response.status_code == 413
    assert error_of(response)["code"] == "payload_too_large"


async def test_a_body_of_unknown_length_is_cut_at_the_limit() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100

    async with visiting(max_body_bytes=1024) as (client, _):
        response = await client.post("/v1/completions", content=endless())
        assert response.status_code == 413
        assert error_of(response)["code"] == "payload_too_large"
        assert (await client.get("/health")).status_code == 200


async def test_a_body_of_a_hundred_megabytes_is_refused() -> None:
    async with visiting() as (client, _):
        response = await client.post("/v1/completions", content=bytes(100 * 2**20))
    assert response.status_code == 413


@pytest.mark.parametrize("path", PATHS)
async def test_a_compressed_body_is_refused_by_its_encoding(path: str) -> None:
    body = json.dumps(COMPLETION).encode()
    async with visiting() as (client, _):
        squeezed = await client.post(path, content=gzip.compress(body), headers={"content-encoding": "gzip"})
        plain = await client.post("/v1/completions", content=body, headers={"content-encoding": "identity"})
    assert squeezed.status_code == 415
    error = error_of(squeezed)
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_media_type")
    assert "'Content-Encoding: gzip': send plain JSON" in error["message"]
    assert plain.status_code == 200


async def test_unknown_paths_and_methods_answer_as_openai_does() -> None:
    async with visiting() as (client, _):
        missing = await client.get("/v1/rankings")
        wrong = await client.get("/v1/completions")
        slash = await client.post("/v1/completions/", json=COMPLETION)
    assert (slash.status_code, slash.json()["error"]["code"]) == (404, "not_found"), "no redirect without a body"
    assert missing.status_code == 404
    assert "/v1/rankings: APIs begin at /v1" in error_of(missing)["message"]
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert "use POST" in error_of(wrong)["message"]


@pytest.mark.parametrize(
    ("method", "path", "why"),
    [
        ("GET", "/v1/responses/resp_1", "responses are not stored; send the whole input"),
        ("DELETE", "/v1/responses/resp_1", "responses are not stored"),
        ("POST", "/api/pull", "models are given when the server starts"),
        ("DELETE", "/api/delete", "models are given when the server starts"),
    ],
)
async def test_an_absent_part_of_an_api_says_why(method: str, path: str, why: str) -> None:
    async with visiting() as (client, _):
        refused = await client.request(method, path)
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert why in (error if path.startswith("/api") else error["message"])


PAGES = [
    "/",
    "/health",
    "/ready",
    "/metrics",
    "/openapi.json",
    "/v1/models",
    "/v1/models/tiny",
    "/v1/models/none",
    "/no",
]


async def test_head_is_answered_like_get_without_a_body() -> None:
    """Monitors ask so, and were told 405: use GET."""
    async with visiting() as (client, _):
        for path in PAGES:
            head, whole = await client.head(path), await client.get(path)
            assert (head.status_code, head.content) == (whole.status_code, b""), path
            assert head.headers["content-type"] == whole.headers["content-type"]
        assert int((await client.head("/")).headers["content-length"]) == len((await client.get("/")).content)
        assert (await client.head("/v1/completions")).status_code == 405
        wrong = await client.delete("/health")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")


async def test_a_request_has_a_name() -> None:
    async with visiting() as (client, generate):
        own = await client.get("/health", headers={"x-request-id": "trace-1"})
        ours = await client.post(
            "/v1/completions", json=COMPLETION, headers={"x-baton-request-id": "mine", "x-request-id": "theirs"}
        )
        fresh = [(await client.get("/health")).headers["x-baton-request-id"] for _ in range(2)]
        strange = await client.get("/health", headers={"x-request-id": "a b\tc" * 100})
        streamed = await client.post("/v1/completions", json=COMPLETION | {"stream": True})
    assert own.headers["x-baton-request-id"] == "trace-1"
    assert ours.headers["x-baton-request-id"] == "mine"
    assert generate.jobs[0].group_id == "mine", "the job is known by the name that the client was told"
    assert len(set(fresh)) == 2
    assert strange.headers["x-baton-request-id"].startswith("req-")
    assert streamed.headers["x-baton-request-id"]
    assert own.headers["x-request-id"] == "trace-1", "where OpenAI's client looks"


async def test_ready_says_why_not() -> None:
    fleet = Crew(Worker(worker_id="decode-0", state="joining", reason="not met yet"))
    async with visiting(fleet=fleet) as (client, _):
        never_met = "never met: decode-0 is joining (not met yet)"
        assert (await client.get("/ready")).json() == {"ready": True, "reason": "", "degraded": never_met}
        joining, fleet.workers = fleet.workers, ()
        assert (await client.get("/ready")).json()["degraded"] == ""
        fleet.amiss = "no Redis"
        degraded = await client.get("/ready")
        assert (degraded.status_code, degraded.json()["degraded"]) == (200, "no Redis"), "it serves all the same"
        assert (await client.get("/admin/status")).json()["degraded"] == "no Redis", "as `baton status` shows it"
        fleet.is_ready, fleet.amiss, fleet.workers = False, "", joining
        unready = await client.get("/ready")
        fleet.workers = ()
        empty = await client.get("/ready")
        assert (await client.get("/health")).status_code == 200, "the process itself is well"
    assert unready.status_code == 503
    assert unready.json() == {"ready": False, "reason": "decode-0 is joining (not met yet)", "degraded": ""}
    assert empty.json()["reason"] == "no worker has joined yet"


async def test_status_lists_the_workers() -> None:
    async with visiting() as (client, _):
        status = (await client.get("/admin/status")).json()
    assert (status["model"], status["ready"], status["reason"]) == ("tiny", True, "")
    [worker] = status["workers"]
    assert (worker["worker_id"], worker["state"], worker["load"]["num_running"]) == ("decode-0", "ready", 3)


async def test_texts_and_conversations_are_counted() -> None:
    async with visiting() as (client, _):
        text = (await client.post("/tokenize", json={"prompt": "hello", "return_token_strs": True})).json()
        bare = (await client.post("/tokenize", json={"prompt": "hello", "add_special_tokens": False})).json()
        chat = (await client.post("/tokenize", json={"messages": CHAT["messages"]})).json()
        back = (await client.post("/detokenize", json={"tokens": bare["tokens"]})).json()
        both = await client.post("/tokenize", json={"messages": CHAT["messages"], "prompt": "x"})
        beyond = await client.post("/detokenize", json={"tokens": [512]})
    assert text["tokens"] == ids_of("<|bos|>hello")
    assert (text["count"], text["max_model_len"]) == (len(text["tokens"]), 256)
    assert "".join(text["token_strs"]) == "<|bos|>hello"
    assert bare["tokens"] == ids_of("hello")
    assert chat["tokens"] == ids_of("<|bos|><|user|>user: hello<|end|><|assistant|>")
    assert back == {"prompt": "hello"}
    assert "either 'prompt' or 'messages'" in error_of(both)["message"]
    assert "between 0 and 511" in error_of(beyond)["message"]


def check_format(shown: str) -> None:
    """Prometheus' own tool checks the format where it is installed."""
    if promtool := shutil.which("promtool"):
        command = [promtool, "check", "metrics"]
        checked = subprocess.run(command, input=shown, capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


async def test_metrics_count_events() -> None:
    metrics = RequestMetrics(model="tiny")

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels | {"model": "tiny"})

    async with visiting(metrics=metrics) as (client, generate):
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/completions", json=COMPLETION | {"stream": True})
        await client.post("/v1/completions", json=COMPLETION | {"temperature": 9})
        await client.post("/v1/completions", content=b"{")
        shown = (await client.get("/metrics")).text
    num_tokens = len(ids_of("hi")) + 1
    for endpoint in ("chat.completions", "completions"):
        assert value("baton_requests_total", endpoint=endpoint, outcome="ok") == 1
        assert value("baton_requests_in_flight", endpoint=endpoint) == 0
        assert value("baton_generated_tokens_total", endpoint=endpoint) == num_tokens
        for name in ("ttft", "tpot", "e2e", "queue"):
            assert value(f"baton_{name}_seconds_count", endpoint=endpoint) == 1
    assert value("baton_requests_total", endpoint="completions", outcome="invalid_request") == 2
    num_prompt = len(generate.jobs[1].prompt_ids)
    assert value("baton_prompt_tokens_total", endpoint="completions") == num_prompt
    assert value("baton_cached_tokens_total", endpoint="completions") == num_prompt // 2
    assert value("baton_ttft_seconds_bucket", endpoint="completions", le="15.0") == 1
    assert value("baton_ttft_seconds_bucket", endpoint="completions", le="20.0") == 1
    for endpoint in ("chat.completions", "completions"):
        assert value("baton_itl_seconds_count", endpoint=endpoint) == num_tokens - 1
        assert value("baton_request_generated_tokens_sum", endpoint=endpoint) == num_tokens
    assert value("baton_request_prompt_tokens_sum", endpoint="completions") == num_prompt
    assert f'version="{VERSION}"' in shown
    assert "_created" not in shown
    check_format(shown)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", ["the first token", "nothing"])
async def test_a_client_that_goes_away_ends_its_jobs(stream: bool, n: int, after: str) -> None:
    metrics = RequestMetrics()
    first = [TokenDelta(token_ids=tuple(ids_of("hello")))] if after == "the first token" else []
    async with visiting(lambda job: [*first, asyncio.Event()], metrics=metrics) as (client, generate):
        body = COMPLETION | {"stream": stream, "n": n}
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(client.post("/v1/completions", json=body))
            await generate.began.wait()
            asking.cancel()
        await asyncio.wait_for(generate.idle.wait(), timeout=60)
        assert len(generate.closed) == n
    outcome = {"endpoint": "completions", "outcome": "cancelled", "model": ""}
    assert metrics.registry.get_sample_value("baton_requests_total", outcome) == 1


async def test_headers_come_with_the_first_token_not_with_the_last() -> None:
    def script(job: Any) -> list[Any]:
        return [TokenDelta(token_ids=tuple(ids_of("hello"))), asyncio.Event()]

    async with visiting(script) as (client, generate):
        async with client.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert json.loads((await anext(response.aiter_lines())).removeprefix("data: "))["choices"][0]["text"]
        await asyncio.wait_for(generate.idle.wait(), timeout=60)


async def test_a_stream_ends_with_done_and_a_failed_one_does_not() -> None:
    async with visiting() as (client, _):
        good = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert good.text.endswith("\n\ndata: [DONE]\n\n")
    failing: Script = lambda job: [TokenDelta(token_ids=tuple(ids_of("hello"))), RuntimeError("a bug")]  # noqa: E731
    async with visiting(failing) as (client, _):
        bad = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    *_, last = [line for line in bad.text.splitlines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "[DONE]" not in bad.text
    assert "a bug" not in bad.text


BEGUN: list[TokenDelta | BaseException] = [
    TokenDelta(token_ids=tuple(ids_of("hello"))),
    Overloaded("too busy", retry_after_s=2.2),
]


LIMITED = {"type": "rate_limit_error", "param": None, "code": "overloaded", "message": "too busy"}


@pytest.mark.parametrize(
    ("path", "body", "place", "error"),
    [
        ("/v1/completions", {"prompt": "hello"}, ("error",), LIMITED),
        ("/v1/chat/completions", CHAT, ("error",), LIMITED),
        ("/v1/messages", CHAT | {"max_tokens": 9}, ("error",), {"type": "overloaded_error", "message": "too busy"}),
        (  # Codex waits for as long as the message says
            "/v1/responses", {"input": "hello"}, ("response", "error"),
            {"code": "rate_limit_exceeded", "message": "too busy. Please try again in 3s."},
        ),
        ("/api/chat", CHAT, (), {"error": "too busy"}),
    ],
)  # fmt: skip
async def test_error_events_of_every_api_say_when_to_retry(
    path: str, body: Any, place: tuple[str, ...], error: dict[str, Any]
) -> None:
    async with visiting(lambda job: BEGUN) as (client, _):
        answer = await client.post(path, json={"model": "tiny", "stream": True} | body)
    assert answer.status_code == 200
    *_, name, last = ["", *answer.text.strip().splitlines()]
    event = json.loads(last.removeprefix("data: "))
    assert name in ("", f"event: {event.get('type')}") or path == "/api/chat"
    for name in place:
        event = event[name]
    assert event == error | {"retry_after": 3}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_bug_of_ours_is_found_in_the_log_by_the_requests_name(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with visiting(lambda job: [RuntimeError("a bug")]) as (client, _):
        named = {"x-request-id": "trace-7"}
        failed = await client.post("/v1/completions", json=COMPLETION | {"stream": stream}, headers=named)
    assert failed.status_code == 500
    assert error_of(failed)["code"] == "internal_error"
    assert failed.headers["x-baton-request-id"] == "trace-7"
    [record] = [record for record in caplog.records if record.name == "baton.http"]
    assert "trace-7" in record.getMessage()
    assert "a bug" in str(record.exc_info)
