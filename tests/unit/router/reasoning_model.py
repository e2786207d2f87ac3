"""A model that reasons: its tokenizer, and workers whose tokens sinks may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import cache
from typing import Any

import tokenizers
from tokenizers import AddedToken

from protos.values import FinishReason, SequenceUpdate
from router.fleet.worker_client import Updates
from router.jobs import Job, TokenDelta
from router.streaming.token_sink import SinkTable
from router.text.chat_template import ChatTemplate
from router.text.reasoning import Reasoning
from router.text.tokenizer import Tokenizer
from router.text.tools.formats import format_of, tag_tokens
from tests.unit.router.scripted import byte_level, ids_of, tokenizer_end

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CONTROLS = (
    "<|channel|>", "<|message|>", "<|start|>", "<|call|>", "<|constrain|>", "<|return|>", "[THINK]", "[/THINK]",
    "[TOOL_CALLS]", "[ARGS]",
)  # fmt: skip

# Qwen3's order: the model begins its reasoning, or the prompt closes it at once.
HYBRID = (
    "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}<|end|>{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ALWAYS = HYBRID.partition("{% if enable_thinking")[0] + "{% endif %}"
OPENED = HYBRID.replace("<|assistant|>", "<|assistant|><think>\n")
MISTRAL = "{{ tools | length }}{% for m in messages %}{{ m.content }}{% endfor %}[THINK][/THINK][TOOL_CALLS][ARGS]"
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}{% endif %}<|end|>{% endfor %}"
    "{{ reasoning_effort }}{% if tools %}to=functions.{{ tools | length }}{% endif %}<|start|>assistant"
)


@cache
def tagged() -> Tokenizer:
    """`byte_level` with marks of reasoning: tags that are not special, and special channels."""
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS])
    return Tokenizer(backend, named_tokens=byte_level().named_tokens)


def reasoning_model(template: str = HYBRID, name: str = "qwen3") -> dict[str, Any]:
    tokenizer = tagged()
    made = ChatTemplate(template, named_tokens=tokenizer.named_tokens, added_tokens=tokenizer.added_tokens)
    form = format_of(made.tool_source)
    return {
        "tokenizer": tokenizer,
        "template": made,
        "tool_format": form,
        "tool_tokens": tag_tokens(form, tokenizer.vocabulary) if form is not None else {},
        "reasoning": Reasoning(name, tokenizer.vocabulary),
    }


class Worker:
    """Gives the tokens of a text, one by one, to the sink where it takes them."""

    def __init__(self, text: str) -> None:
        self.ids: Sequence[int] = [*ids_of(text, tagged()), tokenizer_end(tagged())]
        self.jobs: list[Job] = []
        self.num_taken = 0

    async def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        self.jobs.append(job)
        table, clock = SinkTable(), asyncio.get_running_loop().time
        updates = Updates(job.request_id, 7, table)
        updates.attach(job.client.sink)
        feeding = asyncio.create_task(self._feed(updates, table, clock()))
        try:
            async for update in updates:
                yield TokenDelta(token_ids=update.token_ids, finish_reason=update.finish_reason)
        finally:
            await feeding

    async def _feed(self, updates: Updates, table: SinkTable, now: float) -> None:
        *before, end = self.ids
        for token_id in before:
            await self._read()
            refused, _ = table.deliver([7], [token_id], now)
            self.num_taken += not refused
            if refused:
                updates.put(SequenceUpdate(request_id=updates.request_id, token_ids=(token_id,)))
        await self._read()
        last = SequenceUpdate(request_id=updates.request_id, token_ids=(end,), finish_reason=FinishReason.STOP)
        updates.put(last)

    async def _read(self) -> None:
        """The generators pass on what they have, and wait for more."""
        for _ in range(5):
            await asyncio.sleep(0)
