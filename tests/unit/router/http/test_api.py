"""An error has the form of the API that the client speaks, wherever it is raised."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route

from protos.errors import BatonError, Overloaded
from router.auth.auth import AccessControl
from router.auth.tenants import hash_of
from router.http.api import OPENAI, Api, named_event
from router.http.middleware import Gate, RequestId, received_body
from router.http.sse import EventStream
from router.request_metrics import RequestMetrics


def spoken(error: BatonError) -> dict[str, Any]:
    return {"type": "oops", "words": error.message}


OTHER = Api(
    name="other", paths=("/v1/other",), error_body=spoken, error_event=lambda error: named_event(spoken(error)),
    error_status=lambda error: 418, id_header=b"other-id", key_header=b"other-key",
)  # fmt: skip


async def _body(request: Request) -> Any:
    await received_body(request)
    raise RuntimeError("a bug of ours")


class _Breaking:
    """A stream that fails before or after its first event."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def events(channel: Any) -> Any:
            if scope["path"].endswith("late"):
                yield b"data: 1\n\n"
            raise Overloaded("too busy", retry_after_s=2)

        await EventStream(events, RequestMetrics().track("other"))(scope, receive, send)


@pytest.fixture
def client(tmp_path: Any) -> httpx.AsyncClient:
    path = tmp_path / "tenants.toml"
    path.write_text(f'admin_keys = ["{hash_of("sk-admin")}"]\n[tenants.acme]\nkeys = ["{hash_of("sk-acme")}"]\n')
    app = Starlette(
        routes=[
            Route("/v1/other/body", _body, methods=["POST"]),
            Route("/v1/other/late", _Breaking()),
            Route("/v1/other/early", _Breaking()),
            Route("/v1/chat/late", _Breaking()),
        ],
        middleware=[
            Middleware(RequestId, apis=(OTHER,)),
            Middleware(
                Gate, access=AccessControl(path), paths=("/v1/",), max_head_bytes=4096, max_bytes=100, timeout_s=60
            ),
        ],
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://baton", headers={"other-key": "sk-acme"})


async def test_errors_have_the_form_of_the_path_before_routing_too(client: httpx.AsyncClient) -> None:
    async with client:
        refused = [
            await client.post("/v1/other/body", headers={"other-key": "sk-unknown"}),
            await client.post("/v1/other/body", content=b"x" * 101),
            await client.post("/v1/other/body", headers={"x-long": "x" * 5000}),
            await client.get("/v1/other/early"),
            await client.post("/v1/other/body", content=b"x"),
        ]
        unknown = await client.post("/v1/chat/completions", headers={"other-key": "sk-acme"})
    for answer in refused:
        assert answer.status_code in (418, 500)
        assert answer.json()["type"] == "oops"
        assert answer.headers["other-id"] == answer.headers["x-baton-request-id"]
    assert unknown.status_code == 401  # the header is the other API's
    assert unknown.json()["error"]["code"] == "invalid_api_key"
    assert "other-id" not in unknown.headers


async def test_a_failing_stream_ends_with_its_apis_error_event(client: httpx.AsyncClient) -> None:
    async with client:
        other, ours = await asyncio.gather(
            client.get("/v1/other/late"),
            client.get("/v1/chat/late", headers={"authorization": "Bearer sk-acme"}),
        )
    assert other.content == b"data: 1\n\n" + named_event({"type": "oops", "words": "too busy"})
    assert ours.content.startswith(b"data: 1\n\ndata: ")
    error = OPENAI.error_body(Overloaded("too busy"))["error"]
    assert orjson.loads(ours.content.partition(b"\n\ndata: ")[2]) == {"error": error | {"retry_after": 2}}
