"""Anthropic's own client reads the answers, streamed and not, and the errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from protos.errors import Overloaded
from router.auth.auth import AccessControl
from router.auth.tenants import hash_of
from tests.unit.router.faces.anthropic.test_messages import CALLS, NOW, TOOLED, WEATHER
from tests.unit.router.scripted import Scripted, make_gateway, saying, serving

anthropic: Any = pytest.importorskip("anthropic")

HELLO: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def talking(script: Any, *, strict: bool = True, **changes: Any) -> AsyncIterator[Any]:
    async with (
        serving(make_gateway(Scripted(script), **changes)) as url,
        anthropic.AsyncAnthropic(
            base_url=url, api_key="none", max_retries=0, _strict_response_validation=strict
        ) as client,
    ):
        yield client


async def test_its_stream_gathers_the_message_that_is_sent_whole() -> None:
    async with talking(saying(CALLS, at_once=3), **TOOLED) as client:
        whole = await client.messages.create(**HELLO, tools=[WEATHER, NOW])
        async with client.messages.stream(**HELLO, tools=[WEATHER, NOW]) as stream:
            kinds = Counter([event.type async for event in stream])
            joined = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="tiny", messages=HELLO["messages"], tools=[WEATHER, NOW])
    for message in (whole, joined):
        text, weather, now = message.content
        assert (text.text, weather.name, weather.input, now.input) == (
            "Let me look.", "weather", {"city": 'Paris "x"'}, {},
        )  # fmt: skip
        assert message.stop_reason == "tool_use"
        assert message.usage.input_tokens + message.usage.cache_read_input_tokens == counted.input_tokens
        assert (message.type, message.role, message.usage.cache_creation_input_tokens) == ("message", "assistant", 0)
        assert weather.id != now.id
        assert weather.id.startswith("toolu_")
    assert whole.usage.output_tokens == joined.usage.output_tokens
    assert {"text", "input_json", "content_block_stop", "message_stop"} <= kinds.keys()
    assert kinds["input_json"] > 3, "arguments come in pieces"


async def test_it_lists_models_with_its_key(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f'admin_keys = ["{hash_of("sk-admin")}"]\n[tenants.acme]\nkeys = ["{hash_of("none")}"]\n')
    async with talking(saying("x"), strict=False, access=AccessControl(path)) as client:
        listed = await client.models.list()
        assert [(row.type, row.id, row.display_name, row.max_input_tokens) for row in listed.data] == [
            ("model", "tiny", "tiny", 256)
        ]
        assert (listed.has_more, listed.last_id, listed.data[0].created_at.year) == (False, "tiny", 1970)
        assert (await client.models.retrieve("tiny")) == listed.data[0]
        with pytest.raises(anthropic.NotFoundError, match="'nope' does not exist") as refused:
            await client.models.retrieve("nope")
        body: Any = refused.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
        assert refused.value.request_id
        assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_it_raises_its_own_errors() -> None:
    async with talking(lambda job: [Overloaded("too busy")]) as client:
        with pytest.raises(anthropic.InternalServerError) as overloaded:
            await client.messages.create(**HELLO)
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**HELLO | {"model": "other"})
    assert overloaded.value.status_code == 529
