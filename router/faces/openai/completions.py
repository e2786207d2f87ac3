"""POST /v1/completions: prompts as text or token ids, one or many, with echo."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protos.values import Logprobs
from router.faces.conversation.rendering import send
from router.faces.conversation.speculating import with_speculation
from router.faces.conversation.turn import text_request
from router.faces.openai.openai_bodies import CompletionBody
from router.faces.openai.reply import (
    CompletionLogprobs,
    ReplyRenderer,
    prompt_logprobs,
    reply_head,
    usage_body,
)
from router.gateway import Gateway
from router.http.sse import EventStream
from router.text.detokenizer import Detokenizer
from router.text.sampling_request import SamplingRequest, TextRequest
from router.text.text_stream import TextDelta, Usage
from router.text.tokenizer import Tokenizer


async def completions(gateway: Gateway, request: Request, body: CompletionBody) -> Response | EventStream:
    sampling = await with_speculation(gateway, body.asked(), body.speculation, body.prediction)
    if body.structured_outputs is not None:
        grammar = body.structured_outputs.to_grammar(compact=gateway.texts.config.disable_any_whitespace)
        await gateway.texts.grammars.check(grammar, param="structured_outputs")
        sampling = replace(sampling, grammar=grammar)
    special = {"add_special_tokens": body.add_special_tokens, "split_special_tokens": body.split_special_tokens}
    prompts = await prompts_of(gateway, body.prompt, sampling, **special)
    ask = text_request(gateway, request, "cmpl", sampling, [prompt.ids for prompt in prompts])
    return await send(_CompletionRenderer(gateway, body, ask, prompts), request, stream=body.stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionPrompt:
    """`text`: the client's own text, for an echo; None if it sent token ids."""

    ids: tuple[int, ...]
    text: str | None = None

    def echo(self, tokenizer: Tokenizer) -> str:
        return tokenizer.decode(self.ids) if self.text is None else self.text


async def prompts_of(
    gateway: Gateway,
    prompt: str | Sequence[str | int | list[int]],
    asked: SamplingRequest,
    *,
    add_special_tokens: bool | None = None,
    split_special_tokens: bool | None = None,
) -> list[CompletionPrompt]:
    """Prompts in any of the four forms. Raises ContextLengthExceeded."""
    given = [prompt] if isinstance(prompt, str) else prompt
    if given and all(isinstance(one, int) for one in given):
        return [CompletionPrompt(ids=tuple(one for one in given if isinstance(one, int)))]
    texts = [one for one in given if isinstance(one, str)]
    encoded = await gateway.texts.encode(
        texts, add_special_tokens=add_special_tokens, split_special_tokens=split_special_tokens, asked=asked
    )
    prompts = [CompletionPrompt(ids=ids, text=text) for ids, text in zip(encoded, texts, strict=True)]
    return prompts or [CompletionPrompt(ids=tuple(one)) for one in given if isinstance(one, list)]


class _CompletionRenderer(ReplyRenderer):
    """Writes the texts of one request's prompts, the finish with the last one."""

    kind = "text_completion"

    def __init__(
        self, gateway: Gateway, body: CompletionBody, ask: TextRequest, prompts: Sequence[CompletionPrompt]
    ) -> None:
        self._num_returned = body.n or 1  # for each choice of a prompt
        is_plain = body.logprobs is None and ask.n == self._num_returned
        super().__init__(gateway, body, ask, is_plain=is_plain)
        self._body = body
        self._prompts = prompts
        self._waiting: dict[int, list[Logprobs]] = {}

    def placed(self, index: int, text: str) -> dict[str, Any]:
        return {"choices": [self._choice(TextDelta(index=index, text=text), opening=False)]}

    def whole(self, choices: Sequence[TextDelta], usage: Usage) -> dict[str, Any]:
        if self.ask.n > self._num_returned:
            choices = _best(choices, self.ask.n, self._num_returned)
        reply = reply_head(self.gateway, self.ask.request_id, "text_completion")
        return reply | {"choices": [self._choice(one, opening=True) for one in choices], "usage": usage_body(usage)}

    def read(self, piece: TextDelta, usage: Callable[[], Usage]) -> list[dict[str, Any]]:
        chunks = self.progress(piece, usage)
        if (choice := self._streamed(piece)) is not None:
            chunks.append({"choices": [choice]})
        return chunks

    def _streamed(self, piece: TextDelta) -> dict[str, Any] | None:
        """A choice's next chunk, if it has content. The first chunk waits for the prompt's logprobs, which are complete
        with the first token."""
        opening = piece.index not in self.opened
        if opening:
            waiting = self._waiting.setdefault(piece.index, [])
            waiting.extend(piece.prompt_logprobs)
            if not piece.num_tokens and piece.finish_reason is None:
                return None
            self.opened.add(piece.index)
            piece = replace(piece, prompt_logprobs=tuple(self._waiting.pop(piece.index)))
        speaks = piece.text or piece.finish_reason is not None or (opening and self._body.echo)
        if speaks or (piece.token_ids and (piece.logprobs or self._body.return_token_ids)):
            return self._choice(piece, opening=opening)
        return None

    def _choice(self, piece: TextDelta, *, opening: bool) -> dict[str, Any]:
        """`opening`: the piece is the choice's first, where an echo and the prompt's ids have their place."""
        prompt, tokenizer = self._prompts[piece.index // self._num_returned], self.gateway.texts.tokenizer
        echoing = opening and bool(self._body.echo)
        choice = {
            "index": piece.index,
            "text": (prompt.echo(tokenizer) if echoing else "") + piece.text,
            "logprobs": self._logprobs(piece, prompt, echoing=echoing),
            "finish_reason": piece.finish_reason,
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(piece.prompt_logprobs, tokenizer)
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if opening:
                choice["prompt_token_ids"] = prompt.ids
        return choice

    def _logprobs(self, piece: TextDelta, prompt: CompletionPrompt, *, echoing: bool) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        tokenizer = self.gateway.texts.tokenizer
        columns = CompletionLogprobs(tokenizer, self._body.logprobs)
        if echoing:
            # Special tokens that the tokenizer put round a text have no width in it.
            written = Detokenizer(tokenizer.vocabulary, skip_special_tokens=prompt.text is not None, at_start=True)
            for token_id, entry in zip(prompt.ids, chain([None], _or_none(piece.prompt_logprobs)), strict=False):
                columns.add(token_id, entry, written.num_chars)
                written.feed(token_id)
        shift = len(prompt.echo(tokenizer)) if self._body.echo else 0
        for token_id, entry, offset in zip(piece.token_ids, _or_none(piece.logprobs), piece.text_offsets, strict=False):
            columns.add(token_id, entry, shift + offset)
        return columns.body()


def _best(choices: Sequence[TextDelta], num_made: int, num_returned: int) -> list[TextDelta]:
    """The choices of each prompt with the highest mean logprob, best first, numbered again."""
    texts: list[TextDelta] = []
    for start in range(0, len(choices), num_made):
        ranked = sorted(choices[start : start + num_made], key=_likelihood, reverse=True)
        texts += ranked[:num_returned]
    return [replace(one, index=index) for index, one in enumerate(texts)]


def _likelihood(whole: TextDelta) -> float:
    if not whole.logprobs:
        return -math.inf
    return sum(one.chosen.logprob for one in whole.logprobs) / len(whole.logprobs)


def _or_none(entries: Sequence[Logprobs]) -> Iterator[Logprobs | None]:
    """The worker's entries, then None for missing ones."""
    return chain(entries, repeat(None))
