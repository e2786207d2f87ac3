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

import re
import uuid
from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec.structs import astuple

from protos.codec import Value
from router.text.reasoning import ARGUMENTS, CALL, CALL_END
from router.text.tools.calls import CallReader, Function
from router.text.tools.json_calls import ObjectCalls, ObjectMarks
from router.text.tools.marked_calls import CallMarks, MarkedCalls, NamedCalls
from router.text.tools.parameter_calls import ParameterCalls, ParameterTags
from router.text.tools.pythonic_calls import PythonicCalls, PythonMarks
from router.text.vocabulary import Vocabulary


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


class Written(Value, frozen=True, kw_only=True):
    """Texts around calls: `first` and `last` around all, `before` a name, `middle` before the arguments, `behind` them,
    and `between` calls. With `lead`, which begins a call, an answer may have text before it; without it the answer is
    calls, or a text that begins with the pattern `text`."""

    lead: str = ""
    first: str = ""
    before: str = '{"name": "'
    middle: str = '", "arguments": '
    behind: str = "}"
    between: str = ""
    last: str = ""
    text: str = ""


class CallFormat(Value, frozen=True, kw_only=True):
    """A family's format. Its chat template has one of `signs`, and also `also`. `marks`: how calls are read; None: by
    functions' names alone. `written`: how a grammar writes calls; None: their arguments are no JSON."""

    signs: Sequence[str]
    also: str = ""
    marks: CallMarks | ParameterTags | ObjectMarks | PythonMarks | None = None
    written: Written | None = None


_SEPARATOR, _CALLS, _CALL = "<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
_CALL_END, _CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK = CallMarks(
    begin=_CALL, separator=_SEPARATOR, ends=(f"```{_CALL_END}", _CALL_END), outer=(_CALLS,), outer_end=(_CALLS_END,),
    prefix=f"function{_SEPARATOR}",
)  # fmt: skip
FORMATS: Mapping[ToolFormat, CallFormat] = {
    ToolFormat.GPT_OSS: CallFormat(
        signs=("to=functions.",), marks=CallMarks(begin=CALL, separator=ARGUMENTS, ends=(CALL_END,)),
        written=Written(
            before="<|channel|>commentary to=functions.", middle=" <|constrain|>json<|message|>", behind="")),
    ToolFormat.OLMO3: CallFormat(
        signs=("<function_calls>",), marks=PythonMarks(begin=("<function_calls>",), end=("</function_calls>",))),
    ToolFormat.QWEN3_CODER: CallFormat(
        signs=("<function=",),
        marks=ParameterTags(
            begin="<function=", end="</function>", name_ends=(">",), key="<parameter=", key_end=">",
            close="</parameter>", outer=("<tool_call>", "<seed:tool_call>"),
            outer_end=("</tool_call>", "</seed:tool_call>"), is_lined=True),
        written=Written(
            lead="<tool_call>", before="<tool_call>\n<function=", middle=">\n", behind="</function>\n</tool_call>",
            between="\n")),
    ToolFormat.GLM45: CallFormat(
        signs=("<arg_key>",),
        marks=ParameterTags(
            begin="<tool_call>", end="</tool_call>", name_ends=("<arg_key>", "</tool_call>"), key="<arg_key>",
            key_end="</arg_key>", value="<arg_value>", close="</arg_value>"),
        written=Written(
            lead="<tool_call>", before="<tool_call>", middle="\n", behind="</tool_call>", between="\n")),
    ToolFormat.MINIMAX_M2: CallFormat(
        signs=("<minimax:tool_call>",),
        marks=ParameterTags(
            begin='<invoke name="', end="</invoke>", name_ends=('">',), key='<parameter name="', key_end='">',
            close="</parameter>", outer=("<minimax:tool_call>",), outer_end=("</minimax:tool_call>",)),
        written=Written(
            lead="<minimax:tool_call>", first="<minimax:tool_call>\n", before='<invoke name="', middle='">\n',
            behind="</invoke>\n", last="</minimax:tool_call>")),
    ToolFormat.MISTRAL_ARGS: CallFormat(
        signs=("[ARGS]",), marks=CallMarks(begin="[TOOL_CALLS]", separator="[ARGS]", suffix="[CALL_ID]"),
        written=Written(lead="[TOOL_CALLS]", before="[TOOL_CALLS]", middle="[ARGS]", behind="")),
    ToolFormat.DEEPSEEK_V3: CallFormat(
        signs=(_SEPARATOR,), also="```json", marks=_DEEPSEEK,
        written=Written(
            lead=_CALLS, first=_CALLS, before=f"{_CALL}function{_SEPARATOR}", middle="\n```json\n",
            behind=f"\n```{_CALL_END}", between="\n", last=_CALLS_END)),
    ToolFormat.DEEPSEEK_V31: CallFormat(
        signs=(_SEPARATOR,), marks=_DEEPSEEK,
        written=Written(
            lead=_CALLS, first=_CALLS, before=_CALL, middle=_SEPARATOR, behind=_CALL_END, last=_CALLS_END)),
    ToolFormat.KIMI_K2: CallFormat(
        signs=("<|tool_call_begin|>",),
        marks=CallMarks(
            begin="<|tool_call_begin|>", separator="<|tool_call_argument_begin|>", ends=("<|tool_call_end|>",),
            outer=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
            outer_end=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"), prefix="functions."),
        written=Written(
            lead="<|tool_calls_section_begin|>", first="<|tool_calls_section_begin|>",
            before="<|tool_call_begin|>functions.", middle=":0<|tool_call_argument_begin|>",
            behind="<|tool_call_end|>", last="<|tool_calls_section_end|>")),
    ToolFormat.COMMAND_R: CallFormat(
        signs=("<|START_ACTION|>",), marks=ObjectMarks(begin=("<|START_ACTION|>",), end=("<|END_ACTION|>",)),
        written=Written(
            lead="<|START_ACTION|>", first="<|START_ACTION|>[\n", before='    {"tool_call_id": "0", "tool_name": "',
            middle='", "parameters": ', between=",\n", last="\n]<|END_ACTION|>")),
    ToolFormat.PHI4_MINI: CallFormat(
        signs=("<|/tool|>", "functools["),
        marks=ObjectMarks(begin=("<|tool_call|>", "functools"), end=("<|/tool_call|>",)),
        written=Written(lead="<|tool_call|>", first="<|tool_call|>[", between=", ", last="]<|/tool_call|>")),
    ToolFormat.HERMES: CallFormat(
        signs=("<tool_call>",), marks=ObjectMarks(begin=("<tool_call>",), end=("</tool_call>",)),
        written=Written(
            lead="<tool_call>", before='<tool_call>\n{"name": "', behind="}\n</tool_call>", between="\n")),
    ToolFormat.GRANITE: CallFormat(
        signs=("<|tool_call|>",), marks=ObjectMarks(begin=("<|tool_call|>", "<tool_call>")),
        written=Written(lead="<|tool_call|>", first="<|tool_call|>[", between=", ", last="]")),
    ToolFormat.MISTRAL: CallFormat(
        signs=("[TOOL_CALLS]",), marks=ObjectMarks(begin=("[TOOL_CALLS]",), bare="[{"),
        written=Written(first="[", between=", ", last="]", text=r"/\s*[^\[\s](?s:.*)/")),
    ToolFormat.LLAMA3_JSON: CallFormat(
        signs=('{"name": function name, "parameters"', "<|python_tag|>"),
        marks=ObjectMarks(begin=("<|python_tag|>", "<|python_start|>"), bare="{"),
        written=Written(middle='", "parameters": ', between="; ", text=r"/\s*[^{\s](?s:.*)/")),
    ToolFormat.PYTHONIC: CallFormat(
        signs=("[func_name1(",),
        marks=PythonMarks(begin=("<|python_start|>", "<|python_tag|>"), end=("<|python_end|>",), bare=True)),
    ToolFormat.GLM4: CallFormat(
        signs=("<|observation|>",), also="在调用上述函数时，请使用 Json 格式表示调用的参数",
        written=Written(before="", middle="\n", behind="", text=r"/\n(?s:.*)/")),
}  # fmt: skip
"""The first format whose signs a chat template has decides."""
_HARMONY = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>")
_TAG = re.compile(r"<[^<>]+>|\[[A-Z_]+\]")


def format_of(template: str) -> ToolFormat | None:
    shown = (
        form for form, how in FORMATS.items() if how.also in template and any(sign in template for sign in how.signs)
    )
    return next(shown, None)


def tags_of(form: ToolFormat) -> set[str]:
    """Texts of calls that are tokens in some tokenizers. Readers see them even if they are special."""
    marks = FORMATS[form].marks
    if form is ToolFormat.GPT_OSS or marks is None:
        return set(_HARMONY if marks is not None else ())
    parts = (part for part in astuple(marks) if isinstance(part, str | tuple))
    texts = {text for part in parts for text in ((part,) if isinstance(part, str) else part)}
    return set(filter(_TAG.fullmatch, texts))


def tag_tokens(form: ToolFormat, vocabulary: Vocabulary) -> dict[str, int]:
    """Texts of a format that are tokens, with their ids. (llguidance takes every added token <...> for a special one:
    no text of a grammar is that token.)"""
    tags = {text.encode(): text for text in tags_of(form)}
    return {tags[raw]: i for i, raw in enumerate(vocabulary.token_bytes) if raw in tags}


def reader_of(form: ToolFormat, functions: Sequence[Function]) -> CallReader:
    names = [function.name for function in functions]
    match FORMATS[form].marks:
        case CallMarks() as marks:
            return MarkedCalls(marks)
        case ParameterTags() as tags:
            return ParameterCalls(tags, functions)
        case ObjectMarks() as marks:
            return ObjectCalls(marks, names)
        case PythonMarks() as marks:
            return PythonicCalls(marks)
    return NamedCalls(names)


def new_call_id(form: ToolFormat, *, prefix: str = "call_") -> str:
    """Templates of Mistral's take back no other than nine letters and digits: no prefix."""
    is_short = form in (ToolFormat.MISTRAL, ToolFormat.MISTRAL_ARGS)
    return uuid.uuid4().hex[:9] if is_short else f"{prefix}{uuid.uuid4().hex[:24]}"
