"""Every parameter that OpenAI documents is honoured or refused by name; a bad value is named with what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError

from protos.errors import InvalidRequest, UnsupportedParameter
from router.faces.openai.openai_bodies import ChatBody, CompletionBody
from router.faces.openai.unsupported_params import CHAT_REFUSALS, COMPLETION_REFUSALS
from router.http import body
from router.http.body import Body, parse_body

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "m", "prompt": "hello"}

HARMLESS = {
    "add_special_tokens": False,
    "audio": None,
    "bad_words": [],
    "documents": [],
    "early_stopping": False,
    "echo": False,
    "function_call": "none",
    "functions": [],
    "length_penalty": 1.0,
    "media_io_kwargs": {},
    "metadata": {"run": "7"},
    "mm_processor_kwargs": {},
    "modalities": ["text"],
    "prompt_cache_retention": "in_memory",
    "safety_identifier": "abc",
    "return_tokens_as_token_ids": False,
    "service_tier": "auto",
    "spaces_between_special_tokens": True,
    "store": False,
    "use_beam_search": False,
    "user": "abc",
    "verbosity": "medium",
}
REFUSED = {
    "add_special_tokens": True,
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "chat_template": "x",
    "documents": [{"text": "x"}],
    "early_stopping": True,
    "echo": True,
    "guided_choice": ["a"],
    "guided_decoding_backend": "xgrammar",
    "guided_grammar": "a",
    "guided_json": {},
    "guided_regex": "a",
    "guided_whitespace_pattern": " ",
    "kv_transfer_params": {},
    "length_penalty": 2,
    "logits_processors": ["a"],
    "lora_path": "a",
    "return_tokens_as_token_ids": True,
    "truncate_prompt_tokens": 4,
    "use_beam_search": True,
    "audio": {"voice": "alloy", "format": "wav"},
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni-moderation-latest"},
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
    "store": True,
    "verbosity": "low",
    "web_search_options": {},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | changes}


def deep(depth: int) -> dict[str, Any]:
    return {"items": deep(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("body", "refusals", "documented"),
    [
        (ChatBody, CHAT_REFUSALS, chat_create_params.CompletionCreateParamsBase),
        (CompletionBody, COMPLETION_REFUSALS, completion_create_params.CompletionCreateParamsBase),
    ],
)
def test_no_documented_parameter_is_unknown(body: type[Body], refusals: dict[str, Any], documented: Any) -> None:
    names = body.model_fields.keys() | refusals.keys()
    assert documented.__annotations__.keys() | {"stream"} <= names
    assert not body.model_fields.keys() & refusals.keys(), "honoured and refused at once"


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_values_are_accepted(name: str) -> None:
    parse_body(CHAT | {name: HARMLESS[name]}, ChatBody)
    parse_body(CHAT | {name: None}, ChatBody)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_parameters_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedParameter, match=f"'{name}'") as refused:
        parse_body(CHAT | {name: REFUSED[name]}, ChatBody)
    assert refused.value.param == name


def test_every_refusal_is_tested() -> None:
    assert CHAT_REFUSALS.keys() == HARMLESS.keys() | REFUSED.keys()


def test_suffix_is_refused() -> None:
    parse_body(COMPLETION | {"suffix": ""}, CompletionBody)
    with pytest.raises(UnsupportedParameter, match="'suffix'"):
        parse_body(COMPLETION | {"suffix": "end"}, CompletionBody)


def test_an_answer_of_ours_may_be_sent_back() -> None:
    """OpenAI's client dumps `choices[0].message` with its empty fields."""
    said: dict[str, Any] = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
    }
    parse_body({"model": "m", "messages": [*CHAT["messages"], said]}, ChatBody)
    called = said | {"content": None, "tool_calls": [CALL]}
    parse_body({"model": "m", "messages": [*CHAT["messages"], called]}, ChatBody)
    with pytest.raises(UnsupportedParameter, match=r"'messages\[1\]\.function_call'"):
        parse_body({"model": "m", "messages": [*CHAT["messages"], said | {"function_call": {}}]}, ChatBody)


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        ({"temprature": 1}, "temprature", "Did you mean 'temperature'?"),
        ({"tool": 1}, "tool", "Did you mean 'tools'?"),
        ({"xyzzy": 1}, "xyzzy", "Unknown parameter: 'xyzzy'."),
        ({"temperature": "hot"}, "temperature", "is the string 'hot': it must be a number between 0 and 2"),
        ({"temperature": True}, "temperature", "is true: it must be a number"),
        ({"n": 1.5}, "n", "is 1.5: it must be an integer between 1 and 128"),
        ({"n": 1e30}, "n", "it must be an integer"),
        ({"stream": "yes"}, "stream", "it must be true or false"),
        ({"stop": 5}, "stop", "is 5: it must be a string or a list of at most 32 strings"),
        ({"stop": [1]}, "stop", "is a list of 1: it must be a string or a list of at most 32 strings"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "an object from at most 1024 token ids to numbers"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "from at most 1024 token ids"),
        ({"logit_bias": []}, "logit_bias", "is an empty list: it must be an object"),
        (
            {"stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "Did you mean 'include_usage'?",
        ),
        ({"messages": []}, "messages", "is an empty list: it must be a list of at least one message"),
        ({"messages": "hi"}, "messages", "is the string 'hi'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "Missing required parameter"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "system, developer, user"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a string or a list of text parts"),
        ({"messages": ["hi"]}, "messages[0]", "is the string 'hi'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages[0].content[0].type",
            "this model reads no images",
        ),
        ({"model": None}, "model", "is null"),
        ({"chat_template_kwargs": {"a": {}}}, "chat_template_kwargs", "strings, numbers and booleans"),
        ({"chat_template_kwargs": {str(i): i for i in range(65)}}, "chat_template_kwargs", "at most 64 strings"),
        ({"k" * 100_000: 1}, "k" * 100, "Unknown parameter"),
        ({"cache_salt": ""}, "cache_salt", "1 to 256 characters"),
        ({"stop": ["x"] * 33}, "stop", "a list of at most 32 strings"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids", "a list of at most 128 token ids"),
        (
            {"response_format": {"type": "json_object", "disable_any_whitespace": True}},
            "response_format.disable_any_whitespace",
            """'structured_outputs': {"json": {...}, "disable_any_whitespace": true} instead of 'response_format'.""",
        ),
        (
            {"disable_any_whitespace": True},
            "disable_any_whitespace",
            """It belongs in 'structured_outputs': {"json": {...}, "disable_any_whitespace": true}.""",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {"type": "object"}}},
            "response_format.schema",
            """It belongs in 'response_format.json_schema': {"name": ..., "schema": ...}.""",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object or json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
            "1 to 64 letters",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": deep(65)}}},
            "response_format.json_schema.schema",
            "nested at most 64 deep",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 1024 strings"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "no other kind of tool is offered"),
        ({"tools": [tool(parameters=deep(65))]}, "tools[0].function.parameters", "nested at most 64 deep"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name", "1 to 128 letters"),
        ({"tools": [tool(strickt=True)]}, "tools[0].function.strickt", "Did you mean 'strict'?"),
        ({"tools": [tool()] * 513}, "tools", "at most 512 tools"),
        ({"tool_choice": "always"}, "tool_choice", "none, auto, required or an object"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "none, auto, required or an object"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "Missing required parameter"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            "messages[0].tool_calls",
            "an assistant's message",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].type",
            "Missing required parameter",
        ),
    ],
)
def test_wrong_values_are_named(change: dict[str, Any], param: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_body(CHAT | change, ChatBody)
    assert refused.value.param == param
    assert f"'{param}'" in refused.value.message
    assert told in refused.value.message


@pytest.mark.parametrize("name", ["functions", "web_search_options"])
def test_unprintably_deep_nesting_is_refused(name: str) -> None:
    nested: Any = "x"
    for _ in range(5000):
        nested = {"a": nested}
    with pytest.raises(UnsupportedParameter, match=f"'{name}' is not supported"):
        parse_body(CHAT | {name: nested}, ChatBody)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (CompletionBody, {"prompt": [1, [], "a"] * 1000}),
        (CompletionBody, {"stop_token_ids": [None] * 1000}),
        (ChatBody, {"messages": [{}] * 1000}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * 1000}]}),
    ],
)
def test_a_list_is_refused_at_its_first_wrong_item(
    kind: type[ChatBody | CompletionBody], change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    refused = body._refused

    def count(error: ValidationError, kind: type[Body]) -> InvalidRequest:
        counted.append(error.error_count())
        return refused(error, kind)

    monkeypatch.setattr(body, "_refused", count)
    with pytest.raises(InvalidRequest):
        parse_body((COMPLETION if kind is CompletionBody else CHAT) | change, kind)
    assert counted[0] < 10


@pytest.mark.parametrize("at", ["body", "message", "part", "stream_options"])
def test_an_object_of_too_many_parameters_is_refused_unread(at: str) -> None:
    many: dict[str, Any] = {f"k{i}": 1 for i in range(300)}
    change = {
        "body": many,
        "message": {"messages": [{"role": "user", "content": "x"} | many]},
        "part": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"} | many]}]},
        "stream_options": {"stream": True, "stream_options": many},
    }[at]
    with pytest.raises(InvalidRequest, match=r"One object has 30\d parameters: at most 256 are read"):
        parse_body({"model": "m", "messages": CHAT["messages"]} | change, ChatBody)


@pytest.mark.parametrize("name", ["model", "messages"])
def test_missing_parameters_are_named(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"Missing required parameter: '{name}'"):
        parse_body({key: value for key, value in CHAT.items() if key != name}, ChatBody)


@pytest.mark.parametrize("prompt", [5, {}, None, [1, "a"], [[1], "a"], [1.5], [None]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"'prompt' is .* must be a string, a list of strings") as refused:
        parse_body(COMPLETION | {"prompt": prompt}, CompletionBody)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        (CHAT | {"max_tokens": 5, "max_completion_tokens": 6}, ChatBody, "max_tokens"),
        (CHAT | {"top_logprobs": 2}, ChatBody, "top_logprobs"),
        (CHAT | {"stream_options": {"include_usage": True}}, ChatBody, "stream_options"),
        (CHAT | {"stream": True, "prompt_logprobs": 1}, ChatBody, "prompt_logprobs"),
        (CHAT | {"logit_bias": {"hello": 1}}, ChatBody, "logit_bias"),
        (CHAT | {"logit_bias": {"5": 1, "05": 1}}, ChatBody, "logit_bias"),
        (COMPLETION | {"best_of": 2, "n": 3}, CompletionBody, "best_of"),
        (COMPLETION | {"best_of": 2, "stream": True}, CompletionBody, "best_of"),
    ],
)
def test_contradictions_are_named(body: dict[str, Any], kind: type[ChatBody | CompletionBody], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_body(body, kind).asked()
    assert refused.value.param == param
    assert f"'{param}'" in refused.value.message


def test_parameters_reach_the_request() -> None:
    body = parse_body(
        COMPLETION
        | {"stop": "x", "logit_bias": {"7": -100}, "echo": True, "logprobs": 2, "best_of": 3, "n": 3.0, "top_k": 5},
        CompletionBody,
    )
    asked = body.asked()
    assert (asked.stop, asked.logit_bias, asked.logprobs, asked.prompt_logprobs) == (("x",), ((7, -100.0),), 2, 2)
    assert (asked.n, asked.top_k, asked.temperature) == (3, 5, None)


def test_every_parameter_is_in_the_documents() -> None:
    page = (Path(__file__).parents[5] / "docs" / "api.md").read_text(encoding="utf-8")
    names = ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()
    names |= CHAT_REFUSALS.keys() | COMPLETION_REFUSALS.keys()
    assert not [name for name in names if f"`{name}`" not in page]
