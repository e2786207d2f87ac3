"""Replies of chats and completions: their head, usage and progress, and log-probabilities in three
shapes: those of chats, completions, and vLLM's prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from protos.values import Logprobs, TokenLogprob
from router.faces.conversation.rendering import Renderer
from router.faces.openai.openai_bodies import ChatBody, CompletionBody, StreamOptions
from router.gateway import Gateway
from router.http.api import event
from router.text.sampling_request import TextRequest
from router.text.text_stream import TextDelta, Usage
from router.text.tokenizer import Tokenizer


def reply_head(gateway: Gateway, request_id: str, kind: str) -> dict[str, Any]:
    """`kind` is OpenAI's name of the object."""
    return {
        "id": request_id,
        "object": kind,
        "created": int(gateway.wall_clock()),
        "model": gateway.card.name,
        "system_fingerprint": gateway.fingerprint,
    }


class ReplyRenderer(Renderer):
    """Streams chunks of one head, then the usage of all choices, if requested."""

    kind = ""  # OpenAI's name of a chunk

    def __init__(self, gateway: Gateway, body: ChatBody | CompletionBody, ask: TextRequest, *, is_plain: bool) -> None:
        self.opened: set[int] = set()
        self._options = body.stream_options or StreamOptions()
        is_more = body.return_token_ids or self._options.continuous_usage_stats
        super().__init__(gateway, ask, is_plain=is_plain and not is_more)

    @cached_property
    def _head(self) -> dict[str, Any]:
        head = reply_head(self.gateway, self.ask.request_id, self.kind)
        return head | {"usage": None} if self._options.include_usage else head

    def frame(self, one: dict[str, Any]) -> bytes:
        return event(self._head | one)

    def end(self, usage: Usage) -> bytes:
        last = {"choices": [], "usage": usage_body(usage)}
        return (self.frame(last) if self._options.include_usage else b"") + b"data: [DONE]\n\n"

    def progress(self, piece: TextDelta, usage: Callable[[], Usage]) -> list[dict[str, Any]]:
        """The progress of a prompt, in a chunk without choices like that of the usage."""
        if self._options.continuous_usage_stats:
            self._head["usage"] = usage_body(usage())
        if not piece.num_prompt_computed:
            return []
        progress = {
            "index": piece.index,
            "computed_tokens": piece.num_prompt_computed,
            "cached_tokens": piece.num_cached_tokens,
            "total_tokens": len(self.ask.jobs[piece.index].prompt_ids),
        }
        return [{"choices": [], "prefill_progress": progress}]


def reasoning_fields(text: str) -> dict[str, str]:
    """A message's reasoning by both names that clients read: DeepSeek's, and that of vLLM and OpenRouter."""
    return {"reasoning_content": text, "reasoning": text}


def usage_body(usage: Usage) -> dict[str, Any]:
    details = {
        "audio_tokens": 0,
        "reasoning_tokens": usage.reasoning_tokens,
        "accepted_prediction_tokens": usage.accepted_prediction_tokens,
        "rejected_prediction_tokens": usage.rejected_prediction_tokens,
    }
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": details,
    }


_LOWEST = -9999.0  # OpenAI's substitute for minus infinity, which JSON lacks


def chat_logprobs(entries: Sequence[Logprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """`choices[].logprobs` of a chat; `bytes` join to whole characters where a token holds part of one."""
    content = [
        {**_entry(entry.chosen, tokenizer), "top_logprobs": [_entry(one, tokenizer) for one in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _entry(one: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.vocabulary.bytes_of(one.token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(one.logprob, _LOWEST), "bytes": list(raw)}


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, column by column."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def add(self, token_id: int, entry: Logprobs | None, offset: int) -> None:
        """`entry` is None for a prompt's first token, which nothing predicts."""
        self._columns["tokens"].append(_key(token_id, self._tokenizer))
        self._columns["token_logprobs"].append(None if entry is None else max(entry.chosen.logprob, _LOWEST))
        self._columns["top_logprobs"].append(None if entry is None else self._top(entry))
        self._columns["text_offset"].append(offset)

    def _top(self, entry: Logprobs) -> dict[str, float]:
        """The most likely tokens, and the chosen one if it is not among them."""
        shown = (*entry.top[: self._num_top], entry.chosen)
        return {_key(one.token_id, self._tokenizer): max(one.logprob, _LOWEST) for one in shown}

    def body(self) -> dict[str, Any]:
        return self._columns if self._num_top else self._columns | {"top_logprobs": None}


def _key(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's text, or OpenAI's `bytes:\\xe4\\xbd` for part of a character: texts are the keys of an object."""
    raw = tokenizer.vocabulary.bytes_of(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(entries: Sequence[Logprobs], tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each position an object from token ids, None for the first."""
    return [None, *(_by_id(entry, tokenizer) for entry in entries)]


def _by_id(entry: Logprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    ranks = {entry.chosen.token_id: entry.rank or None} | {one.token_id: rank for rank, one in enumerate(entry.top, 1)}
    return {
        str(one.token_id): {
            "logprob": max(one.logprob, _LOWEST),
            "rank": ranks[one.token_id],
            "decoded_token": tokenizer.token_text(one.token_id),
        }
        for one in (entry.chosen, *entry.top)
    }
