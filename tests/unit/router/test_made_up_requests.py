"""What schemathesis makes up from /openapi.json, within its bounds and beyond them, is answered as described there. Few
bodies, and the same every time (queries are others with every PYTHONHASHSEED: none are made up here); `schemathesis run
URL/openapi.json` makes up more (docs/api.md)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.unit.router.scripted import Scripted, make_gateway, saying, serving

NUM_REQUESTS = 8  # of each kind


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/api/embed"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/api/chat"),
        ("POST", "/api/generate"),
        ("POST", "/v1/responses"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ],
)
async def test_made_up_requests_are_answered_as_described(method: str, path: str) -> None:
    async with (
        serving(make_gateway(Scripted(saying("hi")))) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        document = (await http.get("/openapi.json")).json()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            statuses = await asyncio.to_thread(ask, document, url, method, path, mode)
            assert (200 in statuses) or mode is GenerationMode.NEGATIVE
            assert (400 in statuses) or mode is GenerationMode.POSITIVE


async def test_whatever_is_described_is_accepted(tmp_path: Path) -> None:
    """Each parameter at its bounds and in all of its forms, one after the other: the phase that schemathesis calls
    coverage, within the bounds."""
    async with serving(make_gateway(Scripted(saying("hi")))) as url:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--phases=coverage",
            "--mode=positive", "--include-path-regex=^/v1/(chat/)?completions$", "--no-color",
            cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
    assert "2 passed" in told.decode()


def ask(document: dict[str, Any], url: str, method: str, path: str, mode: GenerationMode) -> set[int]:
    """The statuses of the answers. What a schema cannot say may be refused although it is described (docs/api.md)."""
    described = schemathesis.openapi.from_dict(document)
    described.config.update(base_url=url)
    statuses: set[int] = set()

    @settings(
        max_examples=NUM_REQUESTS,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case[Any]) -> None:
        answer = case.call(timeout=60.0)
        statuses.add(answer.status_code)
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])

    check()
    return statuses
