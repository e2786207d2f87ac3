"""Clients as they are: requests that Codex and Claude Code sent, and OpenAI's Agents SDK in its own environment.

The requests in recorded/ are of codex 0.169.0 and Claude Code 2.1.197, the second of each with a tool's result; long
texts and most tools were cut. Both programs went through that conversation with the gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from router.jobs import Job, TokenDelta
from tests.unit.router.faces.anthropic.test_messages import TOOLED, asking
from tests.unit.router.scripted import Scripted, byte_level, make_gateway, saying, serving

RECORDED = Path(__file__).parent / "recorded"
AGENTS = Path(os.environ.get("BATON_SDKS", Path(__file__).parents[5] / ".venv-sdks")) / "bin" / "python"


def recorded(name: str) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = json.loads((RECORDED / f"{name}.json").read_text())
    return requests


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


async def test_codex_calls_its_tool_and_reads_the_answer() -> None:
    call = 'I look.\n<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo hi"}}\n</tool_call>'
    first, second = recorded("codex")
    async with asking(saying(call, at_once=3), **TOOLED) as (http, _):
        reply = await http.post(first["path"], json=first["body"], headers=first["headers"])
    assert reply.headers["x-baton-ignored"].startswith("tools[3]: namespace, tools[4]: web_search")
    done = [event["item"] for event in events(reply.text) if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["message", "function_call"]
    assert (done[1]["name"], json.loads(done[1]["arguments"])) == ("exec_command", {"cmd": "echo hi"})
    async with asking(saying("It is 42."), **TOOLED) as (http, generate):
        reply = await http.post(second["path"], json=second["body"], headers=second["headers"])
    assert reply.status_code == 200
    last = events(reply.text)[-1]
    assert (last["type"], last["response"]["output"][0]["content"][0]["text"]) == ("response.completed", "It is 42.")
    assert last["response"]["usage"]["input_tokens"] == len(generate.jobs[0].prompt_ids)
    prompt = byte_level().decode(generate.jobs[0].prompt_ids)
    assert prompt.index("Run a command") < prompt.index("echo the answer is") < prompt.index("the answer is 42")


async def test_claude_code_calls_its_tool_and_reads_the_answer() -> None:
    call = 'I look.\n<tool_call>\n{"name": "Bash", "arguments": {"command": "echo hi"}}\n</tool_call>'
    first, second = recorded("claude_code")
    async with asking(saying(call, at_once=3), **TOOLED) as (http, generate):
        reply = await http.post(first["path"], json=first["body"], headers=first["headers"])
    begin, *_, delta, _ = events(reply.text)
    usage = begin["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(generate.jobs[0].prompt_ids)
    assert delta["delta"]["stop_reason"] == "tool_use"
    arguments = "".join(
        event["delta"]["partial_json"] for event in events(reply.text) if "partial_json" in event.get("delta", {})
    )
    assert json.loads(arguments) == {"command": "echo hi"}
    async with asking(saying("It is 42."), **TOOLED) as (http, generate):
        reply = await http.post(second["path"], json=second["body"], headers=second["headers"])
        body = {
            name: value for name, value in second["body"].items() if name in ("model", "messages", "system", "tools")
        }
        counted = await http.post("/v1/messages/count_tokens?beta=true", json=body, headers=second["headers"])
    assert reply.status_code == 200
    assert counted.json() == {"input_tokens": len(generate.jobs[0].prompt_ids)}
    prompt = byte_level().decode(generate.jobs[0].prompt_ids)
    assert "x-anthropic-billing-header" not in prompt, "it differs in each request, and would spoil the prefix cache"
    assert prompt.index("Run a command") < prompt.index("the answer is 42")


def with_tool(job: Job) -> Iterable[TokenDelta | BaseException | asyncio.Event]:
    asked = byte_level().decode(job.prompt_ids)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    return saying("It rains." if "rain in Paris" in asked else call, at_once=3)(job)


@pytest.mark.skipif(not AGENTS.exists(), reason="`make sdks` installs the clients whose pins differ from ours")
@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_an_agent_of_openais_sdk_uses_its_tool(api: str) -> None:
    async with serving(make_gateway(Scripted(with_tool), **TOOLED)) as url:
        process = await asyncio.create_subprocess_exec(
            str(AGENTS), str(Path(__file__).with_name("agents_client.py")), url, api,
            stdout=asyncio.subprocess.PIPE, env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
        out, _ = await process.communicate()
    assert process.returncode == 0
    steps = json.loads(out)
    whole, streamed = steps["whole"].pop("usage"), steps["streamed"].pop("usage")
    assert steps["whole"] == steps["streamed"]
    assert (whole[0], whole[2]) == (streamed[0], streamed[2])
    assert whole[0] == 2
    assert abs(whole[1] - streamed[1]) < 8, "ids of calls are drawn, and have more or fewer tokens"
    assert steps["whole"]["text"] == "It rains."
    assert steps["whole"]["items"] == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    assert "raw_response_event" in steps["events"]
