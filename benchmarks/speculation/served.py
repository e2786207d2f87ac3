"""Compares answers of a running cluster with and without speculation, while its workers drain or die.

    baton up --speculate auto --device cpu --set worker.dtype=float32 --prefill 1 --decode 2
    python -m benchmarks.speculation.served --url http://127.0.0.1:8000 --requests 500
    python -m benchmarks.speculation.served --write-model FOLDER            the demo model, which is shown tools there
    python -m benchmarks.speculation.served --tools                         of `baton up --model FOLDER` with
                                                                            --tool-parser hermes: calls of tools, too
    python -m benchmarks.speculation.served --drain 20                      a worker is replaced every 20 seconds
    python -m benchmarks.speculation.served --kill 20                       or killed: only on the workers' machine

    python -m benchmarks.speculation.served --control                       twice without: differences of other causes

With `--set worker.tp=2` workers have two ranks. Pools of different degrees round differently, and so do two sends of a
request whose prompts they computed: `--control` shows it.

Each request of the matrix of `benchmarks.speculation.identity`, some with several choices, stop strings and streams, is
sent twice: with speculation off, and as the workers speculate. Texts, token ids, calls, finish reasons and usage must
be the same, logprobs to 1e-4 (sums in float32 depend on the batch). Workers drain and die under the second only.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from benchmarks.engine.cpu_engine import DEMO
from benchmarks.speculation.identity import matrix
from protos.values import GenerateRequest

TOLERANCE = 1e-4
MAX_REFUSED = 5
"""Times that a request is sent again which was refused before its first token: the cluster is busy."""
PAUSE_S = 2.0
STOPS = (["e"], ["\n", "the"], ["ing", ")"])
TOOL_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}{{- '<|system|>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|end|>' }}{%- endif %}
{%- for message in messages %}
  {{- '<|' ~ message['role'] ~ '|>' ~ message['content'] | trim ~ '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
FIELDS: Mapping[str, Any] = {
    "name": {"type": "string", "maxLength": 12},
    "limit": {"type": "integer", "minimum": 0, "maximum": 99},
    "kind": {"enum": ["module", "class", "function"]},
    "exact": {"type": "boolean"},
}


@dataclass(slots=True)
class ComparedChoice:
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)  # names and arguments
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(slots=True, kw_only=True)
class ComparedAnswer:
    """`error` in place of the rest if the request failed. `num_accepted` of all choices."""

    choices: list[ComparedChoice]
    num_tokens: int = 0
    error: str = ""

    def difference(self, other: ComparedAnswer) -> str:
        """What differs first; "" if nothing does."""
        if self.error != other.error:
            return f"error: {self.error!r}, {other.error!r}"
        for index, (one, two) in enumerate(zip(self.choices, other.choices, strict=True)):
            for name in ("token_ids", "text", "calls", "finish_reason"):
                if getattr(one, name) != getattr(two, name):
                    return f"{name} of choice {index}: {getattr(one, name)!r}, {getattr(two, name)!r}"
            if len(one.logprobs) != len(two.logprobs):
                return f"number of logprobs of choice {index}"
            if (gap := max(map(_gap, one.logprobs, two.logprobs), default=0.0)) > TOLERANCE:
                return f"logprobs of choice {index}, by {gap:.2g}"
        return "" if self.num_tokens == other.num_tokens else f"usage: {self.num_tokens}, {other.num_tokens}"


def _gap(one: float, two: float) -> float:
    return abs(one - two)


def body_of(request: GenerateRequest, model: str, *, tools: bool = False) -> dict[str, Any]:
    """The request as a body of /v1/completions, with what only gateways know drawn by its number. With `tools` a third
    of them are of /v1/chat/completions, and call tools."""
    if tools and int(request.request_id) % 3 == 0:
        return _chat_body(request, model)
    chance, sampling = Random(request.request_id), request.sampling
    names = (
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
        "logprobs", "ignore_eos",
    )  # fmt: skip
    body = {name: getattr(sampling, name) for name in names}
    body |= {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": max(1, sampling.max_tokens),
        "min_tokens": min(sampling.min_tokens, max(1, sampling.max_tokens)),
        "stop_token_ids": list(sampling.stop_token_ids),
        "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias},
        "n": chance.choice((1, 1, 1, 2, 3)),
        "stream": chance.random() < 0.5,
        "return_token_ids": True,
    }
    if sampling.grammar:
        body["structured_outputs"] = {"json": json.loads(sampling.grammar.removeprefix("start: %json "))}
    elif chance.random() < 0.2:
        body["stop"] = chance.choice(STOPS)
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    elif sampling.prompt_logprobs is not None:
        body["prompt_logprobs"] = sampling.prompt_logprobs
    return body


def _chat_body(request: GenerateRequest, model: str) -> dict[str, Any]:
    chance, sampling = Random(request.request_id), request.sampling
    functions = [
        {
            "name": name,
            "description": f"Finds {name}.",
            "parameters": {
                "type": "object",
                "properties": {field: FIELDS[field] for field in fields},
                "required": fields[: chance.randrange(1, 3)],
                "additionalProperties": False,
            },
            **({"strict": True} if chance.random() < 0.3 else {}),
        }
        for name in chance.sample(("find", "describe", "list_names"), chance.randrange(1, 4))
        for fields in (chance.sample(list(FIELDS), chance.randrange(2, 5)),)
    ]
    named = {"type": "function", "function": {"name": functions[0]["name"]}}
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed")
    body = {name: getattr(sampling, name) for name in names} | {
        "model": model,
        "messages": [{"role": "user", "content": f"What does `{chance.choice(('len', 'os.path.join', 'dict'))}` do?"}],
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": chance.choice(("required", "required", named, "auto")),
        "parallel_tool_calls": chance.random() < 0.5,
        "max_tokens": chance.choice((24, 60, 120)),
        "n": chance.choice((1, 1, 2)),
        "stream": chance.random() < 0.5,
        "logprobs": chance.random() < 0.3,
        "return_token_ids": True,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return body


def write_model(folder: Path) -> None:
    """The demo model with a chat template that shows tools."""
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | {"chat_template": TOOL_TEMPLATE}), encoding="utf-8")


async def ask(
    client: httpx.AsyncClient, body: Mapping[str, Any], request: GenerateRequest, *, plain: bool
) -> ComparedAnswer:
    """`plain`: without speculation."""
    predicted = request.sampling.speculation.prediction_ids
    more: dict[str, Any] = {"speculation": {"enabled": False}} if plain else {}
    if predicted and not plain:
        reply = await client.post("/detokenize", json={"tokens": list(predicted)})
        more["prediction"] = {"type": "content", "content": reply.json()["prompt"]}
    answer = ComparedAnswer(choices=[ComparedChoice() for _ in range(body["n"])])
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with client.stream("POST", path, json={**body, **more}) as response:
        if response.status_code != 200 or not body["stream"]:
            _add(answer, json.loads(await response.aread()))
            return answer
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _add(answer, json.loads(line[6:]))
    return answer


def _add(answer: ComparedAnswer, chunk: Mapping[str, Any]) -> None:
    if "error" in chunk:
        answer.error = str(chunk["error"])
        return
    for one in chunk["choices"]:
        choice = answer.choices[one["index"]]
        choice.token_ids += one.get("token_ids") or ()
        logprobs = one.get("logprobs") or {}
        if "text" in one:
            choice.text += one["text"]
            choice.logprobs += logprobs.get("token_logprobs", ())
        else:
            choice.logprobs += [token["logprob"] for token in logprobs.get("content") or ()]
            _add_message(choice, one.get("message") or one.get("delta") or {})
        choice.finish_reason = one["finish_reason"] or choice.finish_reason
    if usage := chunk.get("usage"):
        answer.num_tokens = usage["completion_tokens"]


def _add_message(choice: ComparedChoice, message: Mapping[str, Any]) -> None:
    choice.text += message.get("content") or ""
    for number, call in enumerate(message.get("tool_calls") or ()):
        index = call.get("index", number)
        choice.calls += [["", ""] for _ in range(index + 1 - len(choice.calls))]
        choice.calls[index][0] += call["function"].get("name") or ""
        choice.calls[index][1] += call["function"].get("arguments") or ""


async def answered(
    client: httpx.AsyncClient, body: Mapping[str, Any], request: GenerateRequest, *, plain: bool
) -> ComparedAnswer:
    """As `ask`, again and again while the request is refused."""
    for _ in range(MAX_REFUSED):
        try:
            answer = await ask(client, body, request, plain=plain)
        except httpx.TransportError as error:
            answer = ComparedAnswer(choices=[], error=repr(error))
        if not answer.error or any(choice.token_ids for choice in answer.choices):
            break
        await asyncio.sleep(PAUSE_S)
    return answer


async def disturb(client: httpx.AsyncClient, drain_s: float, kill_s: float, console: Console) -> None:
    """Replaces or kills a worker of several in its pool from time to time."""
    chance = Random(0)
    while True:
        await asyncio.sleep(min(drain_s, kill_s))
        workers = [one for one in (await client.get("/admin/status")).json()["workers"] if one["state"] == "ready"]
        roles = [one["info"]["role"] for one in workers]
        several = [one for one in workers if roles.count(one["info"]["role"]) > 1]
        if not several:
            continue
        victim = chance.choice(several)
        if drain_s <= kill_s:
            await client.post(f"/admin/workers/{victim['worker_id']}/drain")
        else:
            with suppress(ProcessLookupError):
                os.kill(victim["info"]["process_id"], signal.SIGKILL)
        console.print(f"{victim['worker_id']} {'drains' if drain_s <= kill_s else 'was killed'}")


async def compare(
    url: str,
    requests: Sequence[GenerateRequest],
    *,
    at_once: int,
    drain_s: float,
    kill_s: float,
    tools: bool,
    control: bool,
    console: Console,
) -> list[str]:
    """The differences."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        bodies = [body_of(request, model, tools=tools) for request in requests]
        found: list[str] = []
        num_calls = 0
        for first in range(0, len(requests), at_once):
            part = list(zip(requests[first : first + at_once], bodies[first : first + at_once], strict=True))
            start_s = time.monotonic()
            plain = await asyncio.gather(*[answered(client, body, request, plain=True) for request, body in part])
            disturbing = asyncio.create_task(disturb(client, drain_s, kill_s, console))
            try:
                drafted = await asyncio.gather(
                    *[answered(client, body, request, plain=control) for request, body in part]
                )
            finally:
                disturbing.cancel()
            for (request, _), one, two in zip(part, plain, drafted, strict=True):
                if difference := one.difference(two):
                    found.append(f"request {request.request_id}: {difference}")
                    console.print(found[-1])
            num_failed = sum(bool(one.error) for one in plain)
            num_calls += sum(len(choice.calls) for one in plain for choice in one.choices)
            console.print(
                f"{first + len(part)} of {len(requests)} compared in {time.monotonic() - start_s:.1f} s: "
                f"{len(found)} different, {num_failed} refused, {num_calls} calls so far"
            )
        return found


def main(
    url: Annotated[str, typer.Option(help="URL of a gateway.")] = "http://127.0.0.1:8000",
    requests: Annotated[int, typer.Option(help="Requests of the matrix.")] = 500,
    at_once: Annotated[int, typer.Option(help="Requests that are sent together.")] = 25,
    drain: Annotated[float, typer.Option(help="Seconds between two drains of a worker.")] = math.inf,
    kill: Annotated[float, typer.Option(help="Seconds between two kills of a worker.")] = math.inf,
    first: Annotated[int, typer.Option(help="The first request that is compared.")] = 0,
    vocab_size: Annotated[int, typer.Option(help="Token ids of prompts are below this.")] = 4000,
    seed: Annotated[int, typer.Option(help="Of the matrix.")] = 1,
    tools: Annotated[bool, typer.Option("--tools", help="A third of the requests call tools.")] = False,
    control: Annotated[bool, typer.Option("--control", help="Send each request twice with speculation off.")] = False,
    write: Annotated[Path | None, typer.Option("--write-model", help="Writes a model for --tools, and ends.")] = None,
) -> None:
    console = Console()
    if write is not None:
        write_model(write)
        return
    made = matrix(requests, vocab_size=vocab_size, eos_id=0, with_grammars=True, seed=seed)[first:]
    disturbing = {"drain_s": drain, "kill_s": kill}
    found = asyncio.run(
        compare(url, made, at_once=at_once, **disturbing, tools=tools, control=control, console=console)
    )
    console.print(f"{len(made)} requests, {len(found)} different")
    raise typer.Exit(code=int(bool(found)))


if __name__ == "__main__":
    typer.run(main)
