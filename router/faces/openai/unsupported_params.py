"""Parameters that OpenAI documents and Baton does not offer: accepted at the value where they change nothing,
refused by name at any other."""

from __future__ import annotations

from collections.abc import Mapping

from router.http.body import Harmless, never, one_of

_TEXT_ONLY = "models answer in text here"
_TOOLS = "it is deprecated: use tools and tool_choice"
_TEMPLATE = "what a model's template knows of it is set by chat_template_kwargs"


_TEXT = Harmless(lambda value: isinstance(value, str), {"type": ["string", "null"]}, "it is a string")
_OBJECT = Harmless(lambda value: isinstance(value, dict), {"type": ["object", "null"]}, "it is an object")


def _structured(form: str) -> str:
    return f"it is 'structured_outputs' now: {{\"{form}\": ...}}"


# vLLM's, which its clients always send. /openapi.json leaves them out: a client made from it needs none of them, and so
# many optional values are too many for what makes up requests from it.
OF_VLLM: Mapping[str, Harmless] = {
    "allowed_token_ids": never("logit_bias and structured_outputs choose among tokens here"),
    "bad_words": one_of([], why="logit_bias keeps tokens from being chosen here"),
    "early_stopping": one_of(False, why="there is no beam search here"),
    "guided_choice": never(_structured("choice")),
    "guided_decoding_backend": never("there is one"),
    "guided_grammar": never(_structured("grammar")),
    "guided_json": never(_structured("json")),
    "guided_regex": never(_structured("regex")),
    "guided_whitespace_pattern": never("structured_outputs has disable_any_whitespace"),
    "kv_transfer_params": never("where KV goes is not for a request to say"),
    "length_penalty": Harmless(lambda value: value == 1, {"enum": [1, None]}, "there is no beam search here"),
    "logits_processors": never("requests bring no code"),
    "lora_path": never("an adapter is asked for as the model: see /v1/models"),
    "return_tokens_as_token_ids": one_of(False, why="return_token_ids gives the ids of tokens"),
    "spaces_between_special_tokens": one_of(True, False, why="there are none"),
    "truncate_prompt_tokens": never("prompts are not cut here"),
    "use_beam_search": one_of(False, why="there is no beam search here"),
}


# Identifiers of the caller change no answer. `metadata` is kept with stored answers; nothing is stored.
COMPLETION_REFUSALS: Mapping[str, Harmless] = {
    **OF_VLLM,
    "suffix": one_of("", why="the models that are served continue texts, they fill no gaps"),
    "user": _TEXT,
}
CHAT_REFUSALS: Mapping[str, Harmless] = {
    **OF_VLLM,
    "add_special_tokens": one_of(False, why="the chat template writes them"),
    "audio": never(_TEXT_ONLY),
    "chat_template": never("the model's own is used"),
    "documents": one_of([], why="give their text in the messages"),
    "echo": one_of(False, why="answers to chats do not repeat them"),
    "function_call": one_of("none", why=_TOOLS),
    "functions": one_of([], why=_TOOLS),
    "media_io_kwargs": one_of({}, why=_TEXT_ONLY),
    "metadata": _OBJECT,
    "mm_processor_kwargs": one_of({}, why=_TEXT_ONLY),
    "modalities": one_of(["text"], why=_TEXT_ONLY),
    "moderation": never("nothing is moderated here"),
    "prompt_cache_options": never("every prompt is cached, as long as there is room"),
    "prompt_cache_retention": one_of("in_memory", "in-memory", why="prompts are kept in memory"),
    "safety_identifier": _TEXT,
    "service_tier": one_of("auto", "default", why="there is one tier; priority says who goes first"),
    "store": one_of(False, why="answers are not stored"),
    "user": _TEXT,
    "verbosity": one_of("medium", why=_TEMPLATE),
    "web_search_options": never("models have no web search here"),
}
# OpenAI's client sends these fields back when an answer becomes part of the next request.
MESSAGE_REFUSALS: Mapping[str, Harmless] = {
    "annotations": one_of([]),
    "audio": never(_TEXT_ONLY),
    "cache_control": _OBJECT,
    "function_call": never("it is deprecated: use tool_calls"),
    "images": one_of([], why=_TEXT_ONLY),
    "provider_specific_fields": _OBJECT,
    "refusal": never("models refuse in their content here"),
    "thinking_blocks": one_of([], why="give reasoning_content"),
}
