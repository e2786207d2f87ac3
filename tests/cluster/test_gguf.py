"""`baton serve model.gguf`, with nothing beside the file."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.cluster.deployed import DEMO, PRECISE, Deployed
from tests.gguf_models import convert

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    path = convert(DEMO, tmp_path_factory.mktemp("gguf") / "demo-Q8_0.gguf", "Q8_0", shards=2)
    deployed = Deployed("serve", str(path), *PRECISE, "--port", "0", "--grpc-port", "0")
    try:
        deployed.wait_for("^serving demo-Q8_0 ")
        yield deployed
        assert deployed.stop() == 0, deployed.log
    finally:
        deployed.kill()


def test_the_readmes_question_is_answered_under_the_files_name(served: Deployed) -> None:
    body = {"messages": [{"role": "user", "content": "What does `os.path.exists` do?"}], "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body | {"model": "demo-Q8_0"}, timeout=60.0)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["message"]["content"] == "Test whether a path exists.  Returns False for broken symbolic links"
    assert choice["finish_reason"] == "stop"


def test_a_grammar_sees_the_files_tokens(served: Deployed) -> None:
    body = {
        "model": "demo-Q8_0", "messages": [{"role": "user", "content": "Pick."}], "temperature": 0, "max_tokens": 40,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "pick", "schema": {"enum": ["red", "green"]}},
        },
    }  # fmt: skip
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) in ("red", "green")
