"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import UnsupportedParameter
from router.conversation.sending import send
from router.conversation.speculating import speculation_params
from router.conversation.thinking import Thinking, knows_effort, thinking_options
from router.conversation.turn import ConversationTurn
from router.gateway import Gateway
from router.http.body import read_body, with_bound
from router.http.framing import event
from router.http.middleware import track_of
from router.http.response_channel import ResponseChannel
from router.http.sse import TEXT_PLACEHOLDER, EventStream, SseWriter
from router.metrics import Track
from router.openai.logprobs import chat_logprobs, prompt_logprobs
from router.openai.reply import DONE, progress_body, reasoning_fields, reply_head, usage_body
from router.openai.schema import ChatBody
from router.openai.tool_calls import Calls, calls_of, chat_tooling
from router.text.sampling_request import TextRequest
from router.text.text_stream import TextDelta, UsageCounter, collect


async def chat_completions(gateway: Gateway, request: Request) -> Response | EventStream:
    track = track_of(request)
    body = await read_body(request, ChatBody, gateway.widest)
    gateway = gateway.serving(body.model, track)
    sampling = with_bound(body.asked(), request)
    if body.speculation is not None or body.prediction is not None:
        speculation = await speculation_params(gateway, body.speculation, body.prediction)
        sampling = replace(sampling, speculation=speculation)
    tooling = chat_tooling(body, gateway)
    turn = ConversationTurn(
        messages=[message.to_template() for message in body.messages],
        sampling=sampling,
        tooling=tooling,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        options=_options(gateway, body),
        shows_reasoning=body.include_reasoning is not False,
    )
    ask = await turn.request(gateway, request, gateway.new_id("chatcmpl"))
    chat = _Chat(gateway, body, ask, calls_of(tooling))
    return await send(gateway, request, track, chat, stream=bool(body.stream))


def _options(gateway: Gateway, body: ChatBody) -> Mapping[str, Any] | None:
    """Raises UnsupportedParameter for an effort that the model's chat template does not know."""
    if body.reasoning_effort is None:
        return body.chat_template_kwargs
    if not knows_effort(gateway):
        problem = f"'reasoning_effort' is not supported by the model '{gateway.card.name}'"
        raise UnsupportedParameter(
            f"{problem}: its chat template has no place for it; leave it out", param="reasoning_effort"
        )
    return thinking_options(gateway, Thinking(effort=body.reasoning_effort), body.chat_template_kwargs)


class _Chat:
    """One turn of a conversation, sent whole or as events."""

    def __init__(self, gateway: Gateway, body: ChatBody, ask: TextRequest, calls: Calls | None) -> None:
        self._gateway = gateway
        self._body = body
        self._ask = ask
        self._calls = calls
        self._opened: set[int] = set()

    @property
    def _is_plain(self) -> bool:
        """True if only the text of its tokens is sent."""
        body = self._body
        return not (body.logprobs or body.return_token_ids or body.continuous_usage or self._calls)

    async def whole(self, track: Track) -> dict[str, Any]:
        pieces = self._gateway.answer(self._ask, track, is_plain=self._is_plain)
        choices, usage = await collect(pieces, self._ask)
        reply = reply_head(self._gateway, self._ask.request_id, "chat.completion")
        reply |= {"choices": [self._choice(one) for one in choices], "usage": usage_body(usage)}
        if self._body.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs, self._gateway.tokenizer)
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = self._ask.prompts[0]
        return reply

    def _choice(self, whole: TextDelta) -> dict[str, Any]:
        message: dict[str, Any] = {"content": whole.text}
        finish_reason: str | None = whole.finish_reason
        if self._calls is not None:
            message, finish_reason = self._calls.message(whole)
        if whole.reasoning:
            message |= reasoning_fields(whole.reasoning)
        choice = {
            "index": whole.index,
            "message": {"role": "assistant", **message, "refusal": None},
            "logprobs": self._logprobs(whole),
            "finish_reason": finish_reason,
        }
        return choice | {"token_ids": whole.token_ids} if self._body.return_token_ids else choice

    def events(self, track: Track, channel: ResponseChannel | None) -> AsyncGenerator[bytes, None]:
        """Yields a role for each choice, its text and its finish; then the usage of all, if requested."""
        head = reply_head(self._gateway, self._ask.request_id, "chat.completion.chunk")
        if self._body.include_usage:
            head["usage"] = None
        writer = SseWriter(
            lambda index: head | self._chunk(index, {"content": TEXT_PLACEHOLDER}),
            channel,
            reasoning=lambda index: head | self._chunk(index, reasoning_fields(TEXT_PLACEHOLDER)),
        )
        return writer.behind_held(self._events(track, head, writer))

    async def _events(self, track: Track, head: dict[str, Any], writer: SseWriter) -> AsyncGenerator[bytes, None]:
        tally = UsageCounter(self._ask)
        answer = self._gateway.answer(self._ask, track, tally, is_plain=self._is_plain, writer=writer)
        async with aclosing(answer) as pieces:
            async for piece in pieces:
                if self._body.continuous_usage:
                    head["usage"] = usage_body(tally.usage())
                if chunks := [event(head | chunk) for chunk in self._chunks(piece)]:
                    yield b"".join(chunks)
        usage = tally.usage()
        if self._body.include_usage:
            yield event(head | {"choices": [], "usage": usage_body(usage)})
        yield DONE

    def _chunks(self, piece: TextDelta) -> list[dict[str, Any]]:
        chunks = []
        if piece.num_prompt_computed:
            chunks.append(progress_body(self._ask, piece))
            if not piece.num_tokens and piece.finish_reason is None:
                return chunks
        if piece.index not in self._opened:
            self._opened.add(piece.index)
            opening = self._chunk(piece.index, {"role": "assistant", "content": "", "refusal": None})
            if self._body.return_token_ids:
                opening["prompt_token_ids"] = self._ask.prompts[0]
            chunks.append(opening)
        deltas = [{"content": piece.text}] if piece.text else []
        finish_reason: str | None = piece.finish_reason
        if self._calls is not None:
            deltas, finish_reason = self._calls.deltas(piece)
        if piece.reasoning:
            deltas.insert(0, reasoning_fields(piece.reasoning))
        if piece.token_ids and (piece.logprobs or self._body.return_token_ids):
            deltas = deltas or [{"content": ""}]
        for number, delta in enumerate(deltas):
            spoken = self._chunk(piece.index, delta, logprobs=None if number else self._logprobs(piece))
            if self._body.return_token_ids:
                spoken["choices"][0]["token_ids"] = () if number else piece.token_ids
            chunks.append(spoken)
        if finish_reason is not None:
            chunks.append(self._chunk(piece.index, {}, finish_reason=finish_reason))
        return chunks

    def _chunk(
        self, index: int, delta: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {"choices": [choice]}

    def _logprobs(self, piece: TextDelta) -> dict[str, Any] | None:
        return chat_logprobs(piece.logprobs, self._gateway.tokenizer) if self._body.logprobs else None
