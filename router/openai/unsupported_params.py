"""Parameters that OpenAI documents and Baton does not offer: accepted at the value where they change nothing,
refused by name at any other."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from protos.errors import UnsupportedParameter


@dataclass(frozen=True, slots=True)
class Harmless:
    """Where a parameter changes nothing, for us and as JSON Schema; null never does. `why` it is refused elsewhere."""

    accepts: Callable[[Any], bool]
    schema: Mapping[str, Any]
    why: str


_OFFERED = "this server does not offer it"
_TEXT_ONLY = "models answer in text here"
_TOOLS = "it is deprecated: use tools and tool_choice"
_TEMPLATE = "what a model's template knows of it is set by chat_template_kwargs"


def _one_of(*values: Any, why: str = _OFFERED) -> Harmless:
    def accepts(value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in values)

    return Harmless(accepts, {"enum": [*values, None]}, why)


def _never(why: str = _OFFERED) -> Harmless:
    return Harmless(lambda value: False, {"type": "null"}, why)


_TEXT = Harmless(lambda value: isinstance(value, str), {"type": ["string", "null"]}, "it is a string")
_OBJECT = Harmless(lambda value: isinstance(value, dict), {"type": ["object", "null"]}, "it is an object")


def _structured(form: str) -> str:
    return f"it is 'structured_outputs' now: {{\"{form}\": ...}}"


# vLLM's, which its clients always send. /openapi.json leaves them out: a client made from it needs none of them, and so
# many optional values are too many for what makes up requests from it.
OF_VLLM: Mapping[str, Harmless] = {
    "allowed_token_ids": _never("logit_bias and structured_outputs choose among tokens here"),
    "bad_words": _one_of([], why="logit_bias keeps tokens from being chosen here"),
    "early_stopping": _one_of(False, why="there is no beam search here"),
    "guided_choice": _never(_structured("choice")),
    "guided_decoding_backend": _never("there is one"),
    "guided_grammar": _never(_structured("grammar")),
    "guided_json": _never(_structured("json")),
    "guided_regex": _never(_structured("regex")),
    "guided_whitespace_pattern": _never("structured_outputs has disable_any_whitespace"),
    "kv_transfer_params": _never("where KV goes is not for a request to say"),
    "length_penalty": Harmless(lambda value: value == 1, {"enum": [1, None]}, "there is no beam search here"),
    "logits_processors": _never("requests bring no code"),
    "lora_path": _never("there are no adapters here"),
    "return_tokens_as_token_ids": _one_of(False, why="return_token_ids gives the ids of tokens"),
    "spaces_between_special_tokens": _one_of(True, False, why="there are none"),
    "truncate_prompt_tokens": _never("prompts are not cut here"),
    "use_beam_search": _one_of(False, why="there is no beam search here"),
}


# Identifiers of the caller change no answer. `metadata` is kept with stored answers; nothing is stored.
COMPLETION_REFUSALS: Mapping[str, Harmless] = {
    **OF_VLLM,
    "suffix": _one_of("", why="the models that are served continue texts, they fill no gaps"),
    "user": _TEXT,
}
CHAT_REFUSALS: Mapping[str, Harmless] = {
    **OF_VLLM,
    "add_special_tokens": _one_of(False, why="the chat template writes them"),
    "audio": _never(_TEXT_ONLY),
    "chat_template": _never("the model's own is used"),
    "documents": _one_of([], why="give their text in the messages"),
    "echo": _one_of(False, why="answers to chats do not repeat them"),
    "function_call": _one_of("none", why=_TOOLS),
    "functions": _one_of([], why=_TOOLS),
    "include_reasoning": _one_of(True, why="what a model thinks is part of its content here"),
    "media_io_kwargs": _one_of({}, why=_TEXT_ONLY),
    "metadata": _OBJECT,
    "mm_processor_kwargs": _one_of({}, why=_TEXT_ONLY),
    "modalities": _one_of(["text"], why=_TEXT_ONLY),
    "moderation": _never("nothing is moderated here"),
    "prediction": _never(),
    "prompt_cache_options": _never("every prompt is cached, as long as there is room"),
    "prompt_cache_retention": _one_of("in_memory", "in-memory", why="prompts are kept in memory"),
    "reasoning_effort": _never(_TEMPLATE),
    "safety_identifier": _TEXT,
    "service_tier": _one_of("auto", "default", why="there is one tier; priority says who goes first"),
    "store": _one_of(False, why="answers are not stored"),
    "user": _TEXT,
    "verbosity": _one_of("medium", why=_TEMPLATE),
    "web_search_options": _never("models have no web search here"),
}
# OpenAI's client sends these fields back when an answer becomes part of the next request.
MESSAGE_REFUSALS: Mapping[str, Harmless] = {
    "annotations": _one_of([]),
    "audio": _never(_TEXT_ONLY),
    "cache_control": _OBJECT,
    "function_call": _never("it is deprecated: use tool_calls"),
    "images": _one_of([], why=_TEXT_ONLY),
    "provider_specific_fields": _OBJECT,
    "refusal": _never("models refuse in their content here"),
    "thinking_blocks": _one_of([], why="give reasoning_content"),
}


def without_harmless(body: Mapping[str, Any], refusals: Mapping[str, Harmless], *, where: str = "") -> dict[str, Any]:
    """The body without parameters that change nothing. Raises UnsupportedParameter for one that would."""
    kept = dict(body)
    for name in refusals.keys() & body.keys():
        value = kept.pop(name)
        if value is not None and not refusals[name].accepts(value):
            shown = reprlib.repr(value)  # bounded in depth too: an object may be nested deeper than repr() can go
            raise UnsupportedParameter(
                f"'{where}{name}' is not supported with the value {shown[:80]}{'...' if len(shown) > 80 else ''}: "
                f"{refusals[name].why}; leave it out",
                param=f"{where}{name}",
            )
    return kept
