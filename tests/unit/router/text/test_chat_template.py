"""The same messages give the same prompt as `transformers.apply_chat_template`, in every manner of template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from protos.errors import BadCheckpoint, InvalidRequest, Misconfigured
from protos.model_files.folder import FolderFiles
from protos.model_files.gguf.gguf_files import GGUFFiles
from router.text.bounded_template import BoundedTemplate
from router.text.chat_template import ChatTemplate
from router.text.tools.formats import ToolFormat, format_of
from tests.gguf_writer import write_gguf

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

LLAMA_3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token}}{% endif %}{% endfor %}"
)
CHATML = """{% for message in messages %}
    {% if message.role == "tool" %}{% continue %}{% endif %}
    {% if message.role == "assistant" %}
<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

    {% else %}
<|im_start|>{{ message.role }}
{{ message | tojson }}<|im_end|>

    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}
"""
PARTS = """{% for message in messages %}{% set content = message['content'] %}{{ message.role }}:
{%- if content is string %}{{ content }}{% else %}{% for part in content %}[{{ part.text }}]{% endfor %}{% endif %};
{%- endfor %}"""

# In the manner of Qwen 2.5: tools in the system's turn, calls and what came of them between tags.
TOOLED = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>: <tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
"""
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"é": {}}}}}]
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"é": '"x"'}}}],
}
SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": 'Wie heißt <du>? & "why"'}
ASSISTANT = {"role": "assistant", "content": "Baton.  "}
TOOL = {"role": "tool", "content": "42", "tool_call_id": "a"}
PARTED = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    [text], _ = render_jinja_template([messages], chat_template=source, **TOKENS, **options)
    return str(text)


def ours(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source, named_tokens=TOKENS).rendered(messages, **options).text


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("source", "messages"),
    [
        pytest.param(LLAMA_3, [SYSTEM, USER], id="llama3"),
        pytest.param(LLAMA_3, [USER, ASSISTANT, USER], id="llama3 without system"),
        pytest.param(MISTRAL, [USER, ASSISTANT, USER], id="mistral"),
        pytest.param(CHATML, [SYSTEM, USER, ASSISTANT, TOOL, USER], id="chatml"),
        pytest.param(PARTS, [SYSTEM, PARTED], id="parts"),
    ],
)
def test_prompts_equal_those_of_transformers(
    source: str, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    expected = theirs(source, messages, add_generation_prompt=add_generation_prompt)
    assert ours(source, messages, add_generation_prompt=add_generation_prompt) == expected


async def test_tools_are_shown_as_transformers_shows_them() -> None:
    conversation: list[dict[str, Any]] = [USER, CALLED, TOOL]
    expected = theirs(TOOLED, conversation, tools=TOOLS)
    assert '"name": "f", "parameters"' in expected
    template = ChatTemplate(TOOLED, named_tokens=TOKENS)
    assert (await template.prompt(conversation, tools=TOOLS)).text == expected
    assert template.rendered(conversation, tools=TOOLS).text == expected
    assert (await template.prompt(conversation)).text == theirs(TOOLED, conversation)
    assert (template.shows_tools, format_of(template.tool_source)) == (True, ToolFormat.HERMES)


# GLM-4-0414's order: the name of a called function is metadata, and a result is an observation.
OBSERVING = (
    "{% for m in messages %}{% set meta = m.get('metadata', '') %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' and not meta %}<|assistant|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' and meta %}<|assistant|>{{ meta }} \n{{ m.content }}"
    "{% elif m.role == 'observation' %}<|observation|>\n{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("content", [None, "I look."])
def test_calls_and_results_become_metadata_and_observations(content: str | None) -> None:
    """Neither was, so the model called the same function again."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ]
    said = f"<|assistant|>\n{content}" if content else ""
    called = '<|assistant|>weather \n{"city": "Oslo"}'
    assert ours(OBSERVING, messages) == f"<|user|>\nhi{said}{called}<|observation|>\n7"


@pytest.mark.parametrize("source", [LLAMA_3, MISTRAL, PARTS])
@pytest.mark.parametrize("last", [ASSISTANT, {"role": "assistant", "content": "The answer is"}])
def test_a_last_message_is_left_open_as_transformers_leaves_it(source: str, last: dict[str, Any]) -> None:
    expected = theirs(source, [USER, last], continue_final_message=True)
    assert ours(source, [USER, last], add_generation_prompt=False, continue_final_message=True) == expected


def test_options_reach_the_template() -> None:
    expected = theirs(CHATML, [USER], add_generation_prompt=True, enable_thinking=False)
    assert "<think></think>" in expected
    assert ours(CHATML, [USER], options={"enable_thinking": False}) == expected


def test_options_cannot_replace_the_messages() -> None:
    assert "Be brief" in ours(LLAMA_3, [SYSTEM], options={"messages": "gone"})


def test_text_parts_are_joined_for_a_string_template() -> None:
    joined = {"role": "user", "content": "one\ntwo"}
    assert ours(LLAMA_3, [PARTED]) == ours(LLAMA_3, [joined])


def test_the_day_is_the_one_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", local_time=lambda: datetime(2026, 7, 4))
    assert template.rendered([USER]).text == "04 Jul 2026"


def test_a_template_says_no_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        ours(MISTRAL, [ASSISTANT])
    assert refused.value.param == "messages"


FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('must be first') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls | map(attribute='function.name') | join if m.tool_calls }}"
    "{% endfor %}"
)
DROPS = FIRST_ONLY.replace("{{ raise_exception('must be first') }}", "{% continue %}")
ALTERNATES = (
    "{% set ns = namespace(index=0) %}{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('must be first') }}{% elif m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}[{{ m.role }}]{{ m.content }}{{ 'f' if m.tool_calls }}{% endfor %}"
)
CALL = {"id": "000000001", "type": "function", "function": {"name": "f", "arguments": {}}}
AGENT: list[dict[str, Any]] = [
    {"role": "system", "content": "S1"}, {"role": "system", "content": [{"type": "text", "text": "S2"}]},
    {"role": "user", "content": "U1"}, {"role": "system", "content": "S3"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "T1"},
    {"role": "system", "content": "S4"},
    {"role": "assistant", "content": "A1"}, {"role": "developer", "content": "S5"}, {"role": "user", "content": "U2"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (FIRST_ONLY, "[system]S1\n\nS2[user]U1\n\nS3[assistant]f[tool]T1[user]S4[assistant]A1[user]S5\n\nU2"),
        (DROPS, "[system]S1\n\nS2[user]U1\n\nS3[assistant]f[tool]T1[user]S4[assistant]A1[user]S5\n\nU2"),
        (ALTERNATES, "[system]S1\n\nS2[user]U1\n\nS3[assistant]f[tool]T1\n\nS4[assistant]A1[user]S5\n\nU2"),
        (
            "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no') }}{% endif %}"
            "[{{ m.role }}]{{ m.content }}{% endfor %}",
            "[system]S1[system]S2[user]U1[system]S3[assistant][tool]T1[system]S4[assistant]A1[system]S5[user]U2",
        ),
    ],
)
def test_a_system_turn_stands_where_the_template_takes_it(source: str, prompt: str) -> None:
    template = ChatTemplate(source)
    assert template.rendered(AGENT).text == prompt
    for num_turns in (4, 6, 7, 9):
        assert prompt.startswith(template.rendered(AGENT[:num_turns]).text), "what came before stays in the cache"


def test_turns_of_one_role_are_joined() -> None:
    """Codex sends several user turns, frameworks several assistant turns."""
    turns = [
        {"role": role, "content": text} for role, text in zip(["user"] * 2 + ["assistant"] * 2, "abcd", strict=True)
    ]
    assert ChatTemplate(ALTERNATES).rendered(turns).text == "[user]a\n\nb[assistant]c\n\nd"
    assert ChatTemplate(FIRST_ONLY).rendered(turns).text == "[user]a[user]b[assistant]c[assistant]d"


@pytest.mark.parametrize("call_id", ["call_abcdefghijklmnopqrstuvwx", "c1", "toolu_1", "tool-1-é-"])
def test_foreign_call_ids_are_translated(call_id: str) -> None:
    source = (
        "{% for m in messages %}"
        "{% for id in ([m.tool_call_id] if m.tool_call_id else m.tool_calls | map(attribute='id')) %}"
        "{% if id | length != 9 %}{{ raise_exception('ids are nine letters') }}{% endif %}{{ id }} {% endfor %}"
        "{{ m.content }} {% endfor %}"
    )

    def written(name: str) -> list[str]:
        call = {"id": name, "type": "function", "function": {"name": "f", "arguments": {}}}
        result = {"role": "tool", "tool_call_id": name, "content": "r"}
        return ChatTemplate(source).rendered([USER, {"role": "assistant", "tool_calls": [call]}, result]).text.split()

    ids = [word for word in written(call_id) if len(word) == 9]
    assert len(ids) == 2
    assert len(set(ids)) == 1
    assert ids[0].isalnum()
    assert "abcDEF123" in written("abcDEF123")


def test_all_parts_of_a_system_turn_are_shown() -> None:
    """Mistral Small 3.1 shows the first part only, where there are parts; Claude Code sends two."""
    source = (
        "{% if messages[0]['content'] is string %}{{ messages[0]['content'] }}{% else %}"
        "{{ messages[0]['content'][0]['text'] }}{% endif %}"
        "{% for m in messages[1:] %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    turns = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    assert ChatTemplate(source).rendered(turns).text == "one\ntwoonetwo"


@pytest.mark.parametrize("source", ["{{ messages[7].content }}", "{{ messages.a.b }}", "{{ 1 + messages }}"])
def test_a_template_error_is_the_clients(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        ours(source, [USER])


@pytest.mark.parametrize(
    "source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}"]
)
def test_a_template_cannot_change_or_leave_its_box(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ours(source, [USER])


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        ours("{{ messages | length }}", [USER, ASSISTANT], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="last message with content"):
        ours(LLAMA_3, [{"role": "assistant", "content": ""}], continue_final_message=True)


def test_templates_are_found_where_checkpoints_keep_them(tmp_path: Path) -> None:
    assert ChatTemplate.load(FolderFiles(tmp_path), TOKENS) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert rendered(tmp_path) == "of a processor"
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "plain"}))
    assert rendered(tmp_path) == "plain"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}named"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert rendered(tmp_path) == "<s>named"
    assert rendered(tmp_path, tools=TOOLS) == "tools"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file for tools")
    assert (rendered(tmp_path), rendered(tmp_path, tools=TOOLS)) == ("<s>named", "file for tools")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert (rendered(tmp_path), rendered(tmp_path, tools=TOOLS)) == ("file", "file for tools")
    (tmp_path / "own").write_text("own")
    assert rendered(tmp_path, file=str(tmp_path / "own"), tools=TOOLS) == "own"
    with pytest.raises(Misconfigured, match="absent"):
        rendered(tmp_path, file=str(tmp_path / "absent"))


@pytest.mark.parametrize("names", [["rag", "tool_use"], ["tool_use", "rag"], ["rag"]])
def test_without_a_default_another_template_is_used(names: list[str], tmp_path: Path) -> None:
    named = [{"name": name, "template": name} for name in names]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert rendered(tmp_path) == "rag"
    assert rendered(tmp_path, tools=TOOLS) == ("tool_use" if len(names) > 1 else "rag")


@pytest.mark.parametrize("template", [["plain"], [{"name": "default"}], {"default": "x"}, 7])
def test_templates_of_another_shape_are_refused(template: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(BadCheckpoint, match=r"tokenizer_config\.json.*chat_template"):
        rendered(tmp_path)


def test_a_template_beside_a_gguf_file_is_used(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "llama", "tokenizer.chat_template": "inside"}
    model = write_gguf(tmp_path / "model.gguf", metadata, {})
    assert rendered(model) == "inside"
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert rendered(model) == "beside"


def rendered(path: Path, *, file: str = "", tools: Sequence[Any] = ()) -> str:
    template = ChatTemplate.load(GGUFFiles.open(path) if path.is_file() else FolderFiles(path), TOKENS, file=file)
    assert template is not None
    return template.rendered([USER], tools=tools).text


def test_an_invalid_template_is_refused_at_the_start() -> None:
    with pytest.raises(BadCheckpoint, match="not valid Jinja"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    "long",
    [
        [USER] * 1000,
        [{"role": "user", "content": "x" * 1_000_000}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1000}],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {"x": "y" * 1_000_000}}}]}],
    ],
)
async def test_a_long_conversation_is_written_beside_the_event_loop(long: list[dict[str, Any]]) -> None:
    template = ChatTemplate(MISTRAL.replace("!=", "in [] and"), named_tokens=TOKENS)
    turns: list[str] = []
    asyncio.get_running_loop().call_soon(turns.append, "another client's")
    assert (await template.prompt(long, options={"x": 1})).text == template.rendered(long).text
    assert turns, "the event loop had no turn"


async def test_template_errors_do_not_depend_on_length() -> None:
    template = ChatTemplate(MISTRAL, named_tokens=TOKENS)
    for times in (2, 1000):
        with pytest.raises(InvalidRequest, match="roles must alternate"):
            await template.prompt([ASSISTANT, *[USER, ASSISTANT] * times])


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a method": "{{ 'x'.center(10 ** 10) }}",
    "a filter": "{{ 'x' | center(10 ** 10) }}",
    "a product": "{{ 'x' * 10 ** 10 }}",
    "a power": "{{ 7 ** (10 ** 9) }}",
    "a format": "{{ '%9999999999d' % 1 }}",
    "a format's method": "{{ '{:>9999999999}'.format(1) }}",
    "a text that doubles": (
        "{% set ns = namespace(s='xx') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}"
    ),
    "texts that double": "{% set s = 'xx' %}" + "{% set s = s ~ s %}" * 60 + "{{ s }}",
    "a block that doubles": "{% set s = 'xx' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60 + "{{ s }}",
    "lists in lists": "{% set l = ['x'] %}" + "{% set l = [l, l] %}" * 60 + "{{ l }}",
    "a list that doubles": "{% set l = ['x'] %}" + "{% set l = l + l %}" * 60 + "{{ l }}",
    "a macro": "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "macros": "{% macro m0(s) %}{{ s }}{% endmacro %}"
    + "".join(f"{{% macro m{i}(s) %}}{{{{ m{i - 1}(s) }}}}{{{{ m{i - 1}(s) }}}}{{% endmacro %}}" for i in range(1, 60))
    + "{{ m59('x') }}",
    "replacements": "{% set s = 'xx' %}" + "{% set s = s | replace('x', 'xxxxxxxx') %}" * 40 + "{{ s }}",
    "escapes": "{% set s = '\"' %}" + "{% set s = s | tojson %}" * 60 + "{{ s }}",
    "indentation": "{{ messages | tojson(indent=10 ** 10) }}",
    "words": "{{ lipsum(n=10 ** 7) }}",
    "a recursive loop": "{% for m in messages recursive %}{{ loop([m, m]) }}{% endfor %}",
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_template_that_costs_too_much_is_ended(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.text.bounded_template.CPU_S", 0.1)
    with pytest.raises(InvalidRequest):
        await ChatTemplate(HOSTILE[kind]).prompt([{"role": "user", "content": "x"}])


def test_uncounted_templates_give_the_same_prompt() -> None:
    source = "{{ '=' * 3 }}{% for m in messages %}{{ m.content.zfill(5) }}{{ m | tojson }}{{ tools }}{% endfor %}"
    messages = [{"role": "user", "content": "naïve"}, {"role": "assistant", "content": "x"}]
    counted = source.replace("'=' * 3", "'==='").replace(".zfill(5)", "").replace("{{ m.content }}", "{{ m.content }}")
    plain = ChatTemplate(counted).rendered(messages).text
    assert ChatTemplate(source).rendered(messages).text == plain.replace("x{", "0000x{")


@pytest.mark.parametrize("source", ["{% if x %}" * 3000 + "{% endif %}" * 3000, "{{ x | nope }}", "{{ x is nope }}"])
def test_a_template_that_cannot_be_read_is_a_bad_checkpoint(source: str) -> None:
    with pytest.raises(BadCheckpoint):
        ChatTemplate(source)


@pytest.mark.parametrize("source", [LLAMA_3, MISTRAL, CHATML])
def test_ordinary_templates_are_rendered_here(source: str) -> None:
    assert BoundedTemplate(source).is_counted
