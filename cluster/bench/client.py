"""Sends one completion request to an OpenAI-compatible server and records its events."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import httptools
import orjson

from cluster.bench.bench_load import PrefixSpan, WorkloadItem
from cluster.bench.bench_report import RequestRecord
from cluster.bench.http import Connection, Connections, HttpEndpoint, HttpReply, Opener
from cluster.bench.prompts import Prompts
from protos.errors import InvalidRequest, Unavailable
from protos.listening import netloc

REFUSED = (400, 404, 415, 422, 501)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Parameters beyond OpenAI's own. Each is dropped when the server refuses it.

    Without ids in `prompt` prompts are words, of approximate lengths. Without `ignore_eos` answers may be shorter.
    Without `return_token_ids` an event counts as one token until the server sends its usage.
    """

    return_token_ids: bool = True
    ignore_eos: bool = True
    prompt: bool = True  # token ids
    stream_options: bool = True

    @property
    def given_up(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in fields(self) if not getattr(self, spec.name))


class CompletionClient:
    """Answers are sampled greedily; `further` parameters go into every request."""

    def __init__(
        self,
        endpoint: HttpEndpoint,
        *,
        model: str,
        prompts: Prompts,
        timeout_s: float,
        api_key: str = "",
        further: Mapping[str, Any] | None = None,
        open_one: Opener | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        self._clock = asyncio.get_running_loop().time
        self._connections = Connections(open_one or endpoint, self._clock)
        self._prompts = prompts
        self._timeout_s = timeout_s
        self._sampling: Mapping[str, Any] = {"model": model, "stream": True, "temperature": 0.0} | dict(further or {})
        self._head = _head(endpoint, api_key)
        self.dialect = dialect or Dialect()

    async def learn(self, num_prompt: int) -> None:
        """Drops each extension that the server refuses, by small requests, which also warm it up. Raises InvalidRequest
        if the server refuses even a plain request, Unavailable if it does not answer."""
        probe = WorkloadItem(index=0, spans=(PrefixSpan(key=(2, 0), num_tokens=num_prompt),), num_output=2)
        while True:
            record = await self.ask(probe, self.prepare(probe), start_s=self._clock())
            if not record.error:
                return
            if record.error in ("connection", "timeout", "incomplete"):
                raise Unavailable(f"the server gives no answer: {record.message}")
            left = [spec.name for spec in fields(Dialect) if getattr(self.dialect, spec.name)]
            if not left or record.status not in REFUSED:
                raise InvalidRequest(f"the server refuses even a plain request: {record.message} ({record.error})")
            named = [name for name in left if name in record.message]
            self.dialect = replace(self.dialect, **{(named or left)[0]: False})

    def prepare(self, item: WorkloadItem) -> bytes:
        dialect = self.dialect
        body = dict(self._sampling, max_tokens=item.num_output)
        body["prompt"] = self._prompts.ids(item.spans) if dialect.prompt else self._prompts.text(item.spans)
        if dialect.ignore_eos:
            body["ignore_eos"] = True
        if dialect.return_token_ids:
            body["return_token_ids"] = True
        if dialect.stream_options:
            body["stream_options"] = {"include_usage": True}
        encoded = orjson.dumps(body)
        return b"%s%d\r\n\r\n%s" % (self._head, len(encoded), encoded)

    async def ask(self, item: WorkloadItem, request: bytes, *, start_s: float) -> RequestRecord:
        """Raises only when cancelled: an error is stored in the record."""
        answer = _Answer()
        sent_s: float | None = None
        connection: Connection | None = None
        status, retry_after_s, ended_s = 0, None, None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connections.take()
                sent_s = self._clock()
                reply = await connection.send(request, answer.receive)
            status, retry_after_s, ended_s = reply.status, reply.retry_after_s, self._clock() - start_s
            error, message = answer.outcome(reply)
        except TimeoutError:
            error, message = "timeout", f"no end after {self._timeout_s:g} s"
        except (OSError, httptools.HttpParserError) as failed:
            error, message = ("", "") if answer.ended else ("connection", str(failed) or type(failed).__name__)
        finally:
            if connection is not None:
                self._connections.give_back(connection)
        return RequestRecord(
            index=item.index,
            due_s=item.due_s,
            sent_s=None if sent_s is None else sent_s - start_s,
            arrivals_s=tuple(arrival - start_s for arrival in answer.arrivals),
            num_prompt=answer.num_prompt if answer.num_prompt is not None else item.num_prompt,
            num_output=answer.num_output,
            num_cached=answer.num_cached,
            status=status,
            error=error,
            message=message,
            retry_after_s=retry_after_s,
            ended_s=ended_s,
        )

    def close(self) -> None:
        self._connections.close()


class _Answer:
    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.num_prompt: int | None = None
        self.num_cached: int | None = None
        self.ended = False
        self._finished = False
        self._num_reported: int | None = None
        self._num_ids = 0
        self._error: tuple[str, str] | None = None

    @property
    def num_output(self) -> int:
        """The server's count, or the client's own while there is none."""
        return self._num_reported if self._num_reported is not None else self._num_ids or len(self.arrivals)

    def receive(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.ended = True
            return
        try:
            event = orjson.loads(data)
            if error := event.get("error"):
                self._error = (str(error.get("code") or error.get("type") or "error"), str(error.get("message", "")))
            for choice in event.get("choices") or ():
                self._take(choice, now)
            if usage := event.get("usage"):
                self._count(usage)
        except (orjson.JSONDecodeError, AttributeError, TypeError) as wrong:
            self._error = self._error or ("bad_event", f"{data[:200]!r}: {wrong}")

    def _take(self, choice: Mapping[str, Any], now: float) -> None:
        ids = choice.get("token_ids")
        self._finished = self._finished or bool(choice.get("finish_reason"))
        if ids is None or ids:  # an event with an empty list of tokens counts none
            self.arrivals.append(now)
            self._num_ids += len(ids or ())

    def _count(self, usage: Mapping[str, Any]) -> None:
        self.num_prompt = usage.get("prompt_tokens", self.num_prompt)
        self._num_reported = usage.get("completion_tokens", self._num_reported)
        details = usage.get("prompt_tokens_details") or {}
        self.num_cached = details.get("cached_tokens", self.num_cached)

    def outcome(self, reply: HttpReply) -> tuple[str, str]:
        """Returns code and message, both "" for a complete answer."""
        if reply.status != 200:
            return _refusal(reply)
        if self._error is not None:
            return self._error
        if not self.arrivals or not (self.ended or self._finished):
            return "incomplete", "the stream ended without an end"
        return "", ""


def _refusal(reply: HttpReply) -> tuple[str, str]:
    message = bytes(reply.body).decode("utf-8", "replace")
    code = f"http_{reply.status}"
    try:
        error = orjson.loads(reply.body)["error"]
        code, message = str(error.get("code") or code), str(error["message"])
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        pass
    return code, f"HTTP {reply.status}: {message[:500]}"


def _head(endpoint: HttpEndpoint, api_key: str) -> bytes:
    """The request's bytes up to the value of its last header, Content-Length."""
    lines = [
        f"POST {endpoint.path}/v1/completions HTTP/1.1",
        f"Host: {netloc(endpoint.host, endpoint.port)}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        *([f"Authorization: Bearer {api_key}"] if api_key else []),
        "Content-Length: ",
    ]
    return "\r\n".join(lines).encode()
