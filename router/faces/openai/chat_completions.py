"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import UnsupportedParameter
from router.faces.conversation.rendering import send
from router.faces.conversation.speculating import with_speculation
from router.faces.conversation.turn import ConversationTurn, Thinking, knows_effort, thinking_options
from router.faces.openai.openai_bodies import ChatBody
from router.faces.openai.reply import (
    ReplyRenderer,
    chat_logprobs,
    prompt_logprobs,
    reasoning_fields,
    reply_head,
    usage_body,
)
from router.faces.openai.tool_calls import Calls, calls_of, chat_tooling, message_of
from router.gateway import Gateway
from router.http.sse import EventStream
from router.text.sampling_request import TextRequest
from router.text.text_stream import TextDelta, Usage


async def chat_completions(gateway: Gateway, request: Request, body: ChatBody) -> Response | EventStream:
    sampling = await with_speculation(gateway, body.asked(), body.speculation, body.prediction)
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
    ask = await turn.request(gateway, request, "chatcmpl")
    return await send(_ChatRenderer(gateway, body, ask, calls_of(tooling)), request, stream=body.stream)


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


class _ChatRenderer(ReplyRenderer):
    """Writes a role for each choice, its text and its finish."""

    kind = "chat.completion.chunk"

    def __init__(self, gateway: Gateway, body: ChatBody, ask: TextRequest, calls: Calls | None) -> None:
        super().__init__(gateway, body, ask, is_plain=not (body.logprobs or calls))
        self._body = body
        self._calls = calls

    def placed(self, index: int, text: str) -> dict[str, Any]:
        return _chunk(index, {"content": text})

    def thought(self, index: int, text: str) -> dict[str, Any]:
        return _chunk(index, reasoning_fields(text))

    def read(self, piece: TextDelta, usage: Callable[[], Usage]) -> list[dict[str, Any]]:
        chunks = self.progress(piece, usage)
        if chunks and not piece.num_tokens and piece.finish_reason is None:
            return chunks
        if piece.index not in self.opened:
            self.opened.add(piece.index)
            opening = _chunk(piece.index, {"role": "assistant", "content": "", "refusal": None})
            if self._body.return_token_ids:
                opening["prompt_token_ids"] = self.ask.prompts[0]
            chunks.append(opening)
        return chunks + self._said(piece)

    def _said(self, piece: TextDelta) -> list[dict[str, Any]]:
        deltas = [{"content": piece.text}] if piece.text else []
        finish_reason: str | None = piece.finish_reason
        if self._calls is not None:
            deltas, finish_reason = self._calls.deltas(piece)
        if piece.reasoning:
            deltas.insert(0, reasoning_fields(piece.reasoning))
        if piece.token_ids and (piece.logprobs or self._body.return_token_ids):
            deltas = deltas or [{"content": ""}]
        chunks = []
        for number, delta in enumerate(deltas):
            spoken = _chunk(piece.index, delta, logprobs=None if number else self._logprobs(piece))
            if self._body.return_token_ids:
                spoken["choices"][0]["token_ids"] = () if number else piece.token_ids
            chunks.append(spoken)
        if finish_reason is not None:
            chunks.append(_chunk(piece.index, {}, finish_reason=finish_reason))
        return chunks

    def whole(self, choices: Sequence[TextDelta], usage: Usage) -> dict[str, Any]:
        reply = reply_head(self.gateway, self.ask.request_id, "chat.completion")
        reply |= {"choices": [self._choice(one) for one in choices], "usage": usage_body(usage)}
        if self._body.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs, self.gateway.texts.tokenizer)
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = self.ask.prompts[0]
        return reply

    def _choice(self, piece: TextDelta) -> dict[str, Any]:
        chunks = [chunk["choices"][0] for chunk in self._said(piece)]
        message = message_of([chunk["delta"] for chunk in chunks])
        logprobs = next((chunk["logprobs"] for chunk in chunks if chunk["logprobs"]), None) or self._logprobs(piece)
        finish = chunks[-1]["finish_reason"]
        choice = {"index": piece.index, "message": message, "logprobs": logprobs, "finish_reason": finish}
        return choice | {"token_ids": piece.token_ids} if self._body.return_token_ids else choice

    def _logprobs(self, piece: TextDelta) -> dict[str, Any] | None:
        return chat_logprobs(piece.logprobs, self.gateway.texts.tokenizer) if self._body.logprobs else None


def _chunk(
    index: int, delta: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}]}
