"""`baton adapter list`."""

from __future__ import annotations

import asyncio

import pytest

from cluster.cli.change.adapter import AdapterVerb, adapter
from tests.unit.router.scripted import Scripted, make_gateway, saying, serving


async def test_a_cluster_without_adapters_is_reported_so(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(make_gateway(Scripted(saying("hi")))) as url:
        await asyncio.to_thread(adapter, AdapterVerb.LIST, url=url)
    assert capsys.readouterr().out == "no adapter is loaded\n"
