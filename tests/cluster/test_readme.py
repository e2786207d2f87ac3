"""The commands of the README, the quickstart and the gRPC page run as they are written; only the ports differ."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.deployed import Deployed

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
GRPC_PAGE = (ROOT / "docs" / "grpc.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(command: list[str] | str, **options: Any) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def shape(value: object) -> object:
    """The keys and types of a JSON value, without values that differ from answer to answer."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return type(value).__name__


def test_nothing_waits_to_be_filled_in() -> None:
    """A word in capitals alone on its line, or a heading with nothing under it."""
    prose = re.sub(r"^```.*?^```$", "shown", README, flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^[A-Z][A-Z _-]*$|\b(?:TBD|TODO|FIXME|XXX)\b", prose, re.MULTILINE)
    assert not re.findall(r"^(#+ .*)\n+(?=##? |\Z)", prose, re.MULTILINE)


def test_the_commands_are_the_makefiles() -> None:
    up, tests, own_model = (shlex.split(line, comments=True) for line in blocks(README, "sh")[0].splitlines())
    assert (up, tests) == (["make", "up"], ["make", "test"])
    assert "baton up" in run([*up, "--dry-run"])
    assert "pytest" in run([*tests, "--dry-run"])
    assert "baton up Qwen/Qwen3-0.6B" in run([*own_model, "--dry-run"])


def test_the_request_gets_an_answer_like_the_one_shown(up: Deployed) -> None:
    (request,) = (block for block in blocks(README, "sh") if block.startswith("curl"))
    (shown,) = (json.loads(block) for block in blocks(README, "json"))
    answer = json.loads(run(request.replace("http://127.0.0.1:8000", up.url), shell=True))
    assert shape(answer) == shape(shown)
    assert answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == shown["choices"][0]["finish_reason"]
    assert answer["usage"]["prompt_tokens"] == shown["usage"]["prompt_tokens"]


def test_the_openai_client_streams(up: Deployed) -> None:
    (program,) = blocks(QUICKSTART, "python")
    assert run([sys.executable, "-c", program.replace("http://127.0.0.1:8000", up.url)]).strip()


def test_the_grpc_client_streams(up: Deployed) -> None:
    (program,) = blocks(GRPC_PAGE, "python")
    said = run([sys.executable, "-c", program.replace("127.0.0.1:8001", f"127.0.0.1:{up.grpc_port}")])
    assert re.search(r"^32 tokens, \d+ of the prompt from the cache$", said, re.MULTILINE), said
