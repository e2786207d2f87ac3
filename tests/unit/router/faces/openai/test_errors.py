"""The error classes of OpenAI's client that no other test of an endpoint meets: each for what it is meant for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from protos.errors import DeadlineExceeded
from router.auth.auth import AccessControl
from router.auth.tenants import hash_of
from tests.unit.router.scripted import Scripted, make_gateway, saying, serving, talking

KEY = "sk-baton-acme"
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hello"}


async def test_a_key_that_is_not_for_this_is_denied(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f'admin_keys = ["{hash_of("sk-baton-admin")}"]\n[tenants.acme]\nkeys = ["{hash_of(KEY)}"]\n')
    gateway = make_gateway(Scripted(saying("hi")), access=AccessControl(path))
    async with (
        serving(gateway) as url,
        openai.DefaultAsyncHttpxClient(verify=False) as http,
        openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=http) as client,
    ):
        with pytest.raises(openai.PermissionDeniedError, match="admin_keys") as denied:
            await client.get("/admin/status", cast_to=object)
    assert denied.value.code == "permission_denied"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_timeout_ends_its_request(stream: bool) -> None:
    async with talking(lambda job: [asyncio.Event()]) as (client, generate):
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(**COMPLETION, stream=stream, timeout=0.5)
        await generate.idle.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_that_passes_here_is_the_servers_error(stream: bool) -> None:
    async with talking(lambda job: [DeadlineExceeded("too late")]) as (client, _):
        with pytest.raises(openai.InternalServerError, match="too late") as failed:
            await client.completions.create(**COMPLETION, stream=stream)
    assert (failed.value.status_code, failed.value.code) == (504, "deadline_exceeded")
    assert failed.value.type == "timeout_error"


async def test_a_body_that_is_too_large_keeps_its_status() -> None:
    async with talking(max_body_bytes=1024) as (client, _):
        with pytest.raises(openai.APIStatusError, match="too large") as refused:
            await client.completions.create(model="tiny", prompt="x" * 1024)
    assert (refused.value.status_code, refused.value.code) == (413, "payload_too_large")
