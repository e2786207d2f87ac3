"""More connections than the process may have files open."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import httpx
import pytest
import uvloop

from router.http.protocol import SPARE_FILES
from tests.unit.router.scripted import Scripted, make_gateway, saying, serving


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_connection_beyond_the_limit_is_refused_and_logged(
    new_loop: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was reset, and the log had nothing."""
    limits = [resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[-1], limits[-1]))

    async def talk() -> None:
        async with serving(make_gateway(Scripted(saying("x")))) as url, httpx.AsyncClient(verify=False) as client:
            assert (await client.get(f"{url}/health")).status_code == 200
            limits.append(SPARE_FILES)
            assert (await client.get(f"{url}/health")).status_code == 200, "an open connection goes on"
            async with httpx.AsyncClient(verify=False) as other:
                refused = await other.get(f"{url}/health")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "unavailable"

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(talk())
    assert [record.levelname for record in caplog.records if record.name == "baton.http"] == ["WARNING"]
