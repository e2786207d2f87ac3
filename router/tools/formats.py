"""The tool-call formats of families of models, as data: what calls look like, how one is recognised in a chat template,
and how its calls are read.

    hermes        text <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call> ...        Hermes, Qwen2.5, Qwen3
    qwen3_coder   <tool_call>\\n<function=f>\\n<parameter=city>\\nParis\\n</parameter> ...         Qwen3-Coder, Qwen3.5
    glm45         <tool_call>f\\n<arg_key>city</arg_key>\\n<arg_value>Paris</arg_value> ...      GLM-4.5 and later
    minimax_m2    <minimax:tool_call>\\n<invoke name="f">\\n<parameter name="city">Paris</parameter> ...   MiniMax-M2
    llama3_json   {"name": "f", "parameters": {...}}; {...}      first, or <|python_tag|>   Llama 3.1 and later
    pythonic      [f(city="Paris"), g()]                         first, or <|python_start|> Llama 4, Llama 3.2
    mistral       [TOOL_CALLS] [{"name": "f", "arguments": {...}}, {...}]   the list first  Mistral 7B v0.3, Nemo, Large
    mistral_args  [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}                          later Mistral models
    granite       <|tool_call|>[{"name": "f", "arguments": {...}}, {...}]                   Granite 3
    phi4_mini     the same, or functools[...]; <|/tool_call|> behind it                     Phi-4-mini
    command_r     <|START_ACTION|>[{"tool_name": "f", "parameters": {...}}]<|END_ACTION|>   Command R7B, Command A
    deepseek_v3   <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{...}\\n```...         DeepSeek-V3, R1
    deepseek_v31  <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>                   DeepSeek-V3.1
    kimi_k2       <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...} ...     Kimi K2
    gpt_oss       a message to functions.f in the channel commentary                        gpt-oss
    olmo3         <function_calls>\nf(city="Paris")\ng()\n</function_calls>                  OLMo 3
    glm4          f\n{"city": "Paris"}                                                     GLM-4-0414
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from enum import StrEnum

from router.text.reasoning import ARGUMENTS, CALL, CALL_END
from router.text.vocabulary import Vocabulary
from router.tools.calls import CallReader, Function
from router.tools.json_calls import ObjectCalls, ObjectMarks
from router.tools.marked_calls import CallMarks, MarkedCalls, NamedCalls
from router.tools.parameter_calls import ParameterCalls, ParameterTags
from router.tools.pythonic_calls import PythonicCalls


class ToolFormat(StrEnum):
    HERMES = "hermes"
    QWEN3_CODER = "qwen3_coder"
    GLM45 = "glm45"
    MINIMAX_M2 = "minimax_m2"
    LLAMA3_JSON = "llama3_json"
    PYTHONIC = "pythonic"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral_args"
    GRANITE = "granite"
    PHI4_MINI = "phi4_mini"
    COMMAND_R = "command_r"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    KIMI_K2 = "kimi_k2"
    GPT_OSS = "gpt_oss"
    OLMO3 = "olmo3"
    GLM4 = "glm4"


_SIGNS: Sequence[tuple[ToolFormat, Sequence[str]]] = (
    (ToolFormat.GPT_OSS, ("to=functions.",)),
    (ToolFormat.OLMO3, ("<function_calls>",)),
    (ToolFormat.QWEN3_CODER, ("<function=",)),
    (ToolFormat.GLM45, ("<arg_key>",)),
    (ToolFormat.MINIMAX_M2, ("<minimax:tool_call>",)),
    (ToolFormat.MISTRAL_ARGS, ("[ARGS]",)),
    (ToolFormat.DEEPSEEK_V3, ("<｜tool▁sep｜>", "```json")),
    (ToolFormat.DEEPSEEK_V31, ("<｜tool▁sep｜>",)),
    (ToolFormat.KIMI_K2, ("<|tool_call_begin|>",)),
    (ToolFormat.COMMAND_R, ("<|START_ACTION|>",)),
    (ToolFormat.PHI4_MINI, ("<|/tool|>",)),
    (ToolFormat.PHI4_MINI, ("functools[",)),
    (ToolFormat.HERMES, ("<tool_call>",)),
    (ToolFormat.GRANITE, ("<|tool_call|>",)),
    (ToolFormat.MISTRAL, ("[TOOL_CALLS]",)),
    (ToolFormat.LLAMA3_JSON, ('{"name": function name, "parameters"',)),
    (ToolFormat.LLAMA3_JSON, ("<|python_tag|>",)),
    (ToolFormat.PYTHONIC, ("[func_name1(",)),
    (ToolFormat.GLM4, ("<|observation|>", "在调用上述函数时，请使用 Json 格式表示调用的参数")),
)
"""Signs of a family in its chat template: the first row that is found as a whole decides."""

_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)  # fmt: skip
_MARKED: Mapping[ToolFormat, CallMarks] = {
    ToolFormat.MISTRAL_ARGS: CallMarks(begin="[TOOL_CALLS]", separator="[ARGS]", suffix="[CALL_ID]"),
    **dict.fromkeys(
        (ToolFormat.DEEPSEEK_V3, ToolFormat.DEEPSEEK_V31),
        CallMarks(
            begin="<｜tool▁call▁begin｜>",
            separator="<｜tool▁sep｜>",
            ends=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
            outer=("<｜tool▁calls▁begin｜>",),
            outer_end=("<｜tool▁calls▁end｜>",),
            prefix="function<｜tool▁sep｜>",
        ),
    ),
    ToolFormat.KIMI_K2: CallMarks(
        begin="<|tool_call_begin|>",
        separator="<|tool_call_argument_begin|>",
        ends=("<|tool_call_end|>",),
        outer=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        outer_end=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        prefix="functions.",
    ),
    ToolFormat.GPT_OSS: CallMarks(begin=CALL, separator=ARGUMENTS, ends=(CALL_END,)),
}
PARAMETERS: Mapping[ToolFormat, ParameterTags] = {
    ToolFormat.QWEN3_CODER: ParameterTags(
        begin="<function=", end="</function>", name_ends=(">",), key="<parameter=", key_end=">", close="</parameter>",
        outer=("<tool_call>", "<seed:tool_call>"), outer_end=("</tool_call>", "</seed:tool_call>"), is_lined=True,
    ),
    ToolFormat.GLM45: ParameterTags(
        begin="<tool_call>", end="</tool_call>", name_ends=("<arg_key>", "</tool_call>"), key="<arg_key>",
        key_end="</arg_key>", value="<arg_value>", close="</arg_value>",
    ),
    ToolFormat.MINIMAX_M2: ParameterTags(
        begin='<invoke name="', end="</invoke>", name_ends=('">',), key='<parameter name="', key_end='">',
        close="</parameter>", outer=("<minimax:tool_call>",), outer_end=("</minimax:tool_call>",),
    ),
}  # fmt: skip
_OBJECTS: Mapping[ToolFormat, ObjectMarks] = {
    ToolFormat.HERMES: ObjectMarks(begin=("<tool_call>",), end=("</tool_call>",)),
    ToolFormat.LLAMA3_JSON: ObjectMarks(begin=("<|python_tag|>", "<|python_start|>"), bare="{"),
    ToolFormat.MISTRAL: ObjectMarks(begin=("[TOOL_CALLS]",), bare="[{"),
    ToolFormat.GRANITE: ObjectMarks(begin=("<|tool_call|>", "<tool_call>")),
    ToolFormat.PHI4_MINI: ObjectMarks(begin=("<|tool_call|>", "functools"), end=("<|/tool_call|>",)),
    ToolFormat.COMMAND_R: ObjectMarks(begin=("<|START_ACTION|>",), end=("<|END_ACTION|>",)),
}

TAGS: Mapping[ToolFormat, Sequence[str]] = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolFormat.QWEN3_CODER: ("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
    ToolFormat.GLM45: ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ToolFormat.MINIMAX_M2: ("<minimax:tool_call>", "</minimax:tool_call>"),
    ToolFormat.LLAMA3_JSON: ("<|python_tag|>", "<|python_start|>"),
    ToolFormat.PYTHONIC: ("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]",),
    ToolFormat.MISTRAL_ARGS: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ToolFormat.GRANITE: ("<|tool_call|>",),
    ToolFormat.PHI4_MINI: ("<|tool_call|>", "<|/tool_call|>"),
    ToolFormat.COMMAND_R: ("<|START_ACTION|>", "<|END_ACTION|>"),
    ToolFormat.DEEPSEEK_V3: _DEEPSEEK,
    ToolFormat.DEEPSEEK_V31: _DEEPSEEK,
    ToolFormat.KIMI_K2: (
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    ToolFormat.GPT_OSS: ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"),
    ToolFormat.OLMO3: ("<function_calls>", "</function_calls>"),
}  # fmt: skip
"""Texts of calls that are tokens of their own in some tokenizers: readers see them, also if they are special."""


def format_of(template: str) -> ToolFormat | None:
    """The tool-call format of this chat template; None if the template does not show it."""
    return next((form for form, signs in _SIGNS if all(sign in template for sign in signs)), None)


def tag_tokens(form: ToolFormat, vocabulary: Vocabulary) -> dict[str, int]:
    """Texts of a format that are tokens of their own, with their ids. (llguidance takes every added token <...> for a
    special one: no text of a grammar is that token.)"""
    tags = {text.encode(): text for text in TAGS.get(form, ())}
    return {tags[raw]: i for i, raw in enumerate(vocabulary.token_bytes) if raw in tags}


def reader_of(form: ToolFormat, functions: Sequence[Function]) -> CallReader:
    """`functions` are the tools there are."""
    names = [function.name for function in functions]
    if form in _MARKED:
        return MarkedCalls(_MARKED[form])
    if form in PARAMETERS:
        return ParameterCalls(PARAMETERS[form], functions)
    if form in _OBJECTS:
        return ObjectCalls(_OBJECTS[form], names)
    if form is ToolFormat.GLM4:
        return NamedCalls(names)
    if form is ToolFormat.OLMO3:
        return PythonicCalls(("<function_calls>",), ("</function_calls>",), bare=False)
    return PythonicCalls(("<|python_start|>", "<|python_tag|>"), ("<|python_end|>",), bare=True)


def new_call_id(form: ToolFormat, *, prefix: str = "call_") -> str:
    """Templates of Mistral's take back no other than nine letters and digits: no prefix."""
    is_short = form in (ToolFormat.MISTRAL, ToolFormat.MISTRAL_ARGS)
    return uuid.uuid4().hex[:9] if is_short else f"{prefix}{uuid.uuid4().hex[:24]}"
