"""From a conversation to jobs: the grammar is checked, the chat template applied, the prompt tokenised. How
much the model reasons is set by variables of the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request

from protos.codec import Value
from router.faces.conversation.tooling import Tooling
from router.gateway import Gateway
from router.http.body import with_headers
from router.http.middleware import name_of, tenant_of
from router.text.chat_template import Message
from router.text.reasoning import AnswerReasoning
from router.text.sampling_request import SamplingRequest, TextRequest, make_text_request
from router.text.tools.formats import ToolFormat, reader_of

_SWITCHES = ("enable_thinking", "thinking")  # Qwen3, GLM-4.5 and others; DeepSeek-V3.1 and Granite
_EFFORT = "reasoning_effort"  # gpt-oss and others
_OF_GPT_OSS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}

OFF = "none"
"""The effort that means no reasoning."""


class Thinking(Value, frozen=True, kw_only=True):
    """None: the model's default."""

    is_on: bool | None = None
    effort: str | None = None


def knows_effort(gateway: Gateway) -> bool:
    """Does the chat template know how much a model is to reason?"""
    template = gateway.texts.template
    return template is not None and not template.variables.isdisjoint((*_SWITCHES, _EFFORT))


def thinking_options(
    gateway: Gateway, thinking: Thinking, given: Mapping[str, Any] | None = None
) -> Mapping[str, Any] | None:
    """Variables of the chat template; those `given` by name go first."""
    if gateway.texts.template is None:
        return given
    variables, effort = gateway.texts.template.variables, thinking.effort
    is_on = thinking.is_on if effort is None else effort != OFF
    options: dict[str, Any] = {}
    if is_on is not None:
        options = {name: is_on for name in _SWITCHES if name in variables}
    if effort is not None and _EFFORT in variables:
        is_gpt_oss = gateway.texts.reasoning is not None and gateway.texts.reasoning.name == "gpt_oss"
        options[_EFFORT] = _OF_GPT_OSS.get(effort, effort) if is_gpt_oss else effort
    return options | dict(given or {}) if options else given


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationTurn:
    """`options` are the chat template's own variables. Reasoning that is not shown is left out of the answer."""

    messages: Sequence[Message]
    sampling: SamplingRequest
    tooling: Tooling
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    options: Mapping[str, Any] | None = None
    shows_reasoning: bool = True

    async def prompt(self, gateway: Gateway, http: Request) -> tuple[int, ...]:
        """Token ids. Raises InvalidRequest."""
        return await gateway.texts.encode_chat(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            options=self.options,
            tools=self.tooling.shown,
            param=self.sampling.names.get("prompt", "messages"),
            salt=tenant_of(http).cache_salt(self.sampling.cache_salt.encode()),
        )

    async def request(
        self,
        gateway: Gateway,
        http: Request,
        prefix: str,
        *,
        prompt: tuple[int, ...] | None = None,
        cut: bool = False,
    ) -> TextRequest:
        """Returns the jobs. `prefix` begins the answer's id. `prompt` replaces that of the messages. `cut`: max_tokens
        is cut to what the context holds. Raises InvalidRequest."""
        sampling, tooling, is_raw = self.sampling, self.tooling, prompt is not None
        if tooling.grammar:
            await gateway.texts.grammars.check(tooling.grammar, param=tooling.param)
            sampling = replace(sampling, grammar=tooling.token_grammar or tooling.grammar)
        if prompt is None:
            prompt = await self.prompt(gateway, http)
        if cut and sampling.max_tokens is not None and len(prompt) + sampling.max_tokens > gateway.card.max_model_len:
            sampling = replace(sampling, max_tokens=None)
        reasoning = None
        if gateway.texts.reasoning is not None and not is_raw:
            phase = gateway.texts.reasoning.phase(prompt, is_continued=self.continue_final_message)
            reasoning = AnswerReasoning(
                reasoning=gateway.texts.reasoning,
                phase=phase,
                marks_calls=tooling.form is ToolFormat.GPT_OSS,
                is_shown=self.shows_reasoning,
            )
            if tooling.grammar:
                has_header, ends = tooling.form is ToolFormat.GPT_OSS, gateway.card.eos_token_ids
                if tooling.form is not None and not has_header:  # a call inside would not be bound
                    ends |= frozenset(gateway.texts.tool_tokens.values())
                bound = gateway.texts.reasoning.grammar(sampling.grammar, phase, ends, has_header=has_header)
                sampling = replace(sampling, grammar=bound)
        return text_request(
            gateway,
            http,
            prefix,
            sampling,
            [prompt],
            default_max_tokens=None,
            reasoning=reasoning,
            visible_tokens=frozenset(gateway.texts.tool_tokens.values()) if tooling.form is not None else frozenset(),
            new_calls=partial(reader_of, tooling.form, tooling.functions) if tooling.form is not None else None,
        )


def text_request(
    gateway: Gateway,
    http: Request,
    prefix: str,
    sampling: SamplingRequest,
    prompts: Sequence[tuple[int, ...]],
    **more: Any,
) -> TextRequest:
    """The jobs of an HTTP request. `prefix` begins the answer's id. Raises InvalidRequest."""
    return make_text_request(
        with_headers(sampling, http),
        prompts,
        gateway.card,
        request_id=gateway.new_id(prefix),
        group_id=name_of(http),
        tenant=tenant_of(http),
        **more,
    )
