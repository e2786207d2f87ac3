"""`baton serve` of two models: one address, two fleets, each with workers, status and metrics of its own."""

from __future__ import annotations

from dataclasses import replace

import httpx
import openai
import pytest

from cluster.doctor.gather import examine
from cluster.doctor.rules import findings
from tests.cluster.deployed import DEMO, Deployed

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_two_models_are_served_at_one_address() -> None:
    models = [f"--model={name}={DEMO}" for name in ("one", "org/two")]
    cluster = Deployed("serve", *models, "--workers", "1", "--processes", "2", "--port", "0", "--device", "cpu")
    try:
        url = cluster.wait_for(r"^serving one, org/two at (\S+), gRPC")[1]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert [entry.id for entry in client.models.list()] == ["one", "org/two"]
            said = {
                name: client.completions.create(model=name, prompt="import os\n", max_tokens=8, temperature=0)
                for name in ("one", "org/two")
            }
        assert said["one"].choices[0].text == said["org/two"].choices[0].text != ""
        assert [answer.model for answer in said.values()] == ["one", "org/two"]
        for name, path in (("one", ""), ("org-two", "/models/org/two")):
            status = httpx.get(f"{url}{path}/admin/status", timeout=10.0).json()
            assert [(worker["worker_id"], worker["state"]) for worker in status["workers"]] == [
                (f"{name}-colocated-0", "ready")
            ]
            assert status["capacity"]["desired"]["counts"] == {"colocated": 1}
        pages = [httpx.get(f"{own}/metrics", timeout=10.0).text for own in cluster.urls]
        for name in said:
            answered = f'baton_requests_total{{endpoint="completions",model="{name}",outcome="ok"}} 1.0'
            assert sum(answered in page for page in pages) == 1
            assert all(f'baton_pool_prompt_tokens_total{{model="{name}",pool="colocated"}}' in page for page in pages)
        seen = examine(url)
        assert [len(view.workers) for view in seen] == [1, 1]
        assert list(findings(*(replace(view, host=None) for view in seen))) == []
        assert cluster.stop() == 0
        assert cluster.processes() == {}
    finally:
        cluster.kill()
