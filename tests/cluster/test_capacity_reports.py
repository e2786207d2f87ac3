"""Reports of every gateway process's clients reach the owner of the fleet: a real cluster of two processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.cluster.deployed import Deployed

pytestmark = pytest.mark.cluster


def sights(four: Deployed) -> list[dict[str, Any]]:
    replied = httpx.get(f"{four.url}/admin/capacity/sights", timeout=10.0).json()["sights"]
    return [reply["sight"] for reply in replied]


def test_all_processes_report_requests_when_queried(four: Deployed) -> None:
    four.wait_until(lambda: len(sights(four)) == 2)
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(lambda number: four.text(f"# {number}", max_tokens=4), range(8)))
    four.wait_until(lambda: sum(sight["num_arrived"] for sight in sights(four)) >= 8)
    seen = sights(four)
    assert {worker["role"] for status in seen for worker in status["workers"]} == {"prefill", "decode"}
    assert four.metric("baton_desired_workers", "prefill") == 2.0
