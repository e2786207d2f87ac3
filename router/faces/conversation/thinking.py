"""How much a model is to reason: a request's words as variables of the chat template that know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protos.codec import Value
from router.gateway import Gateway

_SWITCHES = ("enable_thinking", "thinking")  # Qwen3, GLM-4.5 and others; DeepSeek-V3.1 and Granite
_EFFORT = "reasoning_effort"  # gpt-oss and others
_OF_GPT_OSS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}

OFF = "none"
"""The effort that means no reasoning."""


class Thinking(Value, frozen=True, kw_only=True):
    """None: the model's default."""

    is_on: bool | None = None
    effort: str | None = None


def knows_switch(gateway: Gateway) -> bool:
    """Can a request turn the model's reasoning on and off?"""
    return _has_any(gateway, _SWITCHES)


def knows_effort(gateway: Gateway) -> bool:
    """Does the chat template know how much a model is to reason?"""
    return _has_any(gateway, (*_SWITCHES, _EFFORT))


def _has_any(gateway: Gateway, names: Sequence[str]) -> bool:
    template = gateway.texts.template
    return template is not None and not template.variables.isdisjoint(names)


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
