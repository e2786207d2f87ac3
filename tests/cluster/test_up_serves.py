"""`baton up`, as a person meets it: an answer that went from the prefill worker to the decode worker."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import httpx
import jsonschema
import openai
import pytest

from cluster.doctor.gather import examine
from cluster.doctor.rules import findings
from protos import inference_pb2, inference_pb2_grpc
from tests.cluster.deployed import LONG, Deployed

pytestmark = pytest.mark.cluster


def test_it_is_ready_and_says_who_serves(up: Deployed) -> None:
    assert httpx.get(f"{up.url}/ready").status_code == 200
    workers = {worker["worker_id"]: worker["state"] for worker in up.status()["workers"]}
    assert workers == {"prefill-0": "ready", "decode-0": "ready"}


def test_where_it_serves_is_the_only_line_read_from_stdout(up: Deployed) -> None:
    [url] = re.findall(r"^demo at (http://\S+), ", up.greeting)
    assert url == up.url
    assert "Baton: demo" in httpx.get(url).text


def test_a_batch_runs_without_a_setting(up: Deployed) -> None:
    """Nothing was kept unless a folder was named."""
    body = {"model": "demo", "prompt": "import", "max_tokens": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0) as client:
        file = client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        up.wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")


def test_a_chat_is_answered(up: Deployed) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "What does os.path.join do?"}], "temperature": 0}
    answer = httpx.post(f"{up.url}/v1/chat/completions", json=body | {"max_tokens": 32}, timeout=60.0)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
    assert answer.json()["usage"]["completion_tokens"] > 0


def test_a_long_prompt_reaches_decode_from_prefill(up: Deployed) -> None:
    prompt = f"# nobody has asked this before\n{LONG}"
    read, received = (
        up.metric("baton_pool_prompt_tokens_total", "prefill"),
        up.metric("baton_pool_transfer_bytes_total", "decode"),
    )
    response = up.complete(prompt)
    num_tokens = response.json()["usage"]["prompt_tokens"]
    assert num_tokens > 64
    assert up.metric("baton_pool_prompt_tokens_total", "prefill") == read + num_tokens
    assert up.metric("baton_pool_transfer_bytes_total", "decode") > received


def test_streamed_and_whole_answers_are_the_same(up: Deployed) -> None:
    whole = up.text(LONG)
    body = {"model": "demo", "prompt": LONG, "max_tokens": 24, "temperature": 0.0, "stream": True}
    with httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=60.0) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == whole


def test_an_answer_fits_the_schema_it_was_asked_for(up: Deployed) -> None:
    """One pool makes its first token, the other pool the rest; the demo model does not know JSON."""
    sizes = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 99999},
        "minItems": 2,
        "maxItems": 3,
    }
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "sizes": sizes},
        "required": ["name", "sizes"],
        "additionalProperties": False,
    }
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none") as client:
        reply = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": LONG}],
            response_format={"type": "json_schema", "json_schema": {"name": "file", "schema": schema}},
            temperature=0,
            max_completion_tokens=200,
        )
    [choice] = reply.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), schema)


def test_concurrent_answers_equal_single_ones(up: Deployed) -> None:
    prompts = [f"# case {number}\n{LONG[: 60 * (number % 6 + 1)]}" for number in range(32)]
    alone = [up.text(prompt, max_tokens=8) for prompt in prompts[:4]]
    with ThreadPoolExecutor(len(prompts)) as clients:
        together = list(clients.map(lambda prompt: up.text(prompt, max_tokens=8), prompts))
    assert together[:4] == alone
    up.wait_until(lambda: not any(worker["load"]["num_running"] for worker in up.status()["workers"]))


def test_the_grpc_service_answers_too(up: Deployed) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{up.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        asked = inference_pb2.GenerateRequest(
            model="demo", text=LONG, sampling=inference_pb2.Sampling(temperature=0.0, max_tokens=24)
        )
        assert stub.Complete(asked, timeout=60).choices[0].text == up.text(LONG)


def test_the_doctor_finds_nothing(up: Deployed) -> None:
    """With BATON_DOCTOR_RUNS=20 it runs as often, and examines this host too. Otherwise speeds may be those of a busy
    machine."""
    runs = os.environ.get("BATON_DOCTOR_RUNS", "")
    for _ in range(int(runs or 1)):
        [seen] = examine(up.url)
        reported = findings(seen if runs else replace(seen, host=None))
        assert [entry for entry in reported if runs or entry.name not in ("lane-slow", "lane-not-worth-it")] == []
        [probe] = seen.probes
        assert (probe.name, probe.error) == ("prefill-0 to decode-0", "")
        digests = [seen.status["digests"][""], *(worker["info"]["digests"] for worker in seen.workers)]
        assert digests == [digests[0]] * 3
        assert all(digests[0].values())
