"""Requests that schemathesis makes up from /openapi.json, within its bounds and beyond them, are answered as described
there. Few requests, and the same every time (in processes of their own where there are queries, which differ with
PYTHONHASHSEED); `make fuzz` makes up others, and its findings become tests here."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from router.http.body import MAX_TTFT_MS
from router.observe.ledger.ledger_store import LedgerStore
from router.observe.ledger.ledger_tables import ledger_database
from router.observe.ledger.prices import PriceList
from router.observe.ledger.request_ledger import RequestLedger
from tests.conftest import FUZZ
from tests.unit.router.batches.batching import Batching
from tests.unit.router.fake_cluster import Cluster
from tests.unit.router.operating import ask, operating
from tests.unit.router.scripted import Scripted, make_gateway, saying, serving, with_card

pytestmark = pytest.mark.hypothesis  # for `make fuzz`
NUM_REQUESTS = 200 if FUZZ in os.environ else 8  # of each kind
LOST_IN_FORMS = """
[[operations]]  # of a field that no form has schemathesis says that it was accepted, though it has left it out
include-name = "POST /v1/files"
checks.negative_data_rejection.enabled = false
"""
ANSWERING = "^/v1/(chat/|completions|emb|rerank|score|responses|messages$|messages/c)|^/api/(chat|e|g|show)|tokenize$"
"""The routes whose bodies are made up in this process."""


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/rerank"),
        ("POST", "/v1/score"),
        ("POST", "/api/embed"),
        ("POST", "/api/embeddings"),
        ("POST", "/api/show"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/api/chat"),
        ("POST", "/api/generate"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ],
)
async def test_made_up_requests_are_answered_as_described(method: str, path: str) -> None:
    async with (
        serving(with_card(make_gateway(Scripted(saying("hi"))), is_embedder=True)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        document = (await http.get("/openapi.json")).json()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            statuses = await asyncio.to_thread(made_up, document, url, method, path, mode)
            assert (200 in statuses) or mode is GenerationMode.NEGATIVE
            assert (400 in statuses) or mode is GenerationMode.POSITIVE


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        ("/v1/messages", {"max_tokens": 2**31, "stream": True}, "max_tokens"),
        ("/v1/messages", {"max_tokens": 2**31}, "max_tokens"),
        ("/v1/completions", {"n": 0, "best_of": 1}, "n"),
        ("/v1/completions", {"n": -3, "best_of": 1}, "n"),
        ("/v1/completions", {"echo": True, "logprobs": 2, "prompt_logprobs": -3}, "prompt_logprobs"),
        ("/v1/chat/completions", {"max_tokens": -1, "max_completion_tokens": 5}, "max_tokens"),
    ],
)
async def test_no_other_parameter_hides_one_out_of_range(path: str, wrong: dict[str, Any], param: str) -> None:
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    async with (
        serving(make_gateway(Scripted(saying("hi")))) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        answer = await http.post(path, json={"model": "tiny"} | prompt | wrong)
        late = await http.post(
            path, json={"model": "tiny", "max_tokens": 5, "max_ttft_ms": 5.0} | prompt, headers={MAX_TTFT_MS: "0"}
        )
    assert (answer.status_code, late.status_code) == (400, 400)
    error = answer.json()["error"]
    assert error.get("param", error["message"].split("'")[1]) == param


async def test_the_other_routes_answer_as_described(cluster: Cluster, tmp_path: Path) -> None:
    """Files, batches, the ledger's pages and the operator's routes; by links, also what an answer names."""
    made = Batching(tmp_path / "batches")
    store = LedgerStore(ledger_database(tmp_path / "ledger.db"))
    ledger = RequestLedger(store, PriceList(device_hour=36.0, prices=()), cluster.fleet, model="tiny")
    async with operating(cluster, batches=made.storage, ledger=ledger) as (client, _):
        assert (await ask(client, "one")).status_code == 200
        told = await run(
            str(client.base_url).rstrip("/"), tmp_path, "--phases=coverage,fuzzing,stateful",
            f"--exclude-path-regex={ANSWERING}|/drain$", "--exclude-checks=positive_data_acceptance",
            f"--max-examples={NUM_REQUESTS // 2}",
        )  # fmt: skip
    await asyncio.to_thread(ledger.close)
    await made.close()
    assert (num_tested := re.search(r"Tested: ([0-9]+)", told))
    assert int(num_tested[1]) >= 40


async def run(url: str, folder: Path, *options: str) -> str:
    (folder / "schemathesis.toml").write_text(LOST_IN_FORMS)
    chance = f"--seed={os.environ[FUZZ]}" if FUZZ in os.environ else "--generation-deterministic"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--no-color", chance, *options,
        cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )  # fmt: skip
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
    return told.decode()


def made_up(document: dict[str, Any], url: str, method: str, path: str, mode: GenerationMode) -> set[int]:
    """The statuses of the answers. What a schema cannot say may be refused although it is described (docs/api.md)."""
    described = schemathesis.openapi.from_dict(document)
    described.config.update(base_url=url)
    statuses: set[int] = set()
    # A schema does not know which parameters go together: of 8 bodies of a chat none may be accepted.
    num_requests = max(NUM_REQUESTS, 64) if mode is GenerationMode.POSITIVE else NUM_REQUESTS

    @settings(max_examples=num_requests, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case[Any]) -> None:
        answer = case.call(timeout=60.0)
        statuses.add(answer.status_code)
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])

    check()
    return statuses
