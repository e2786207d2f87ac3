"""Reasoning is separated from the answer token by token, whatever marks a model has."""

from __future__ import annotations

import pytest

from router.text.reasoning import ARGUMENTS, CALL, CALL_END, AnswerReasoning, Phase, Reasoning, format_of
from tests.unit.router.reasoning_model import tagged
from tests.unit.router.scripted import byte_level, ids_of, sentencepiece

HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>Well.<|end|>"
)


def split(text: str, name: str = "qwen3", phase: Phase = Phase.BEFORE, *, calls: bool = False) -> tuple[str, str]:
    """Reasoning and answer."""
    tokenizer = tagged() if name != "seed_oss" else byte_level()
    reader = Reasoning(name, tokenizer.vocabulary).reader(phase, marks_calls=calls)
    hidden = tokenizer.vocabulary.special
    parts = [
        reader.feed(token_id, "" if token_id in hidden else tokenizer.vocabulary.whole_text(token_id) or "")
        for token_id in ids_of(text, tokenizer)
    ]
    thoughts, answers = zip(*parts, reader.end(), strict=True)
    return "".join(thoughts), "".join(answers)


@pytest.mark.parametrize(
    ("text", "name", "phase", "expected"),
    [
        ("<think>\nfox\n</think>\n\nthe dog", "qwen3", Phase.BEFORE, ("fox\n", "the dog")),
        ("\n<think>fox</think>dog", "qwen3", Phase.BEFORE, ("fox", "dog")),
        ("fox\n</think>\n\ndog", "deepseek_r1", Phase.INSIDE, ("fox\n", "dog")),
        ("<think>fox</think>dog", "deepseek_r1", Phase.INSIDE, ("fox", "dog")),
        ("\n the <think> dog", "qwen3", Phase.BEFORE, ("", "\n the <think> dog")),
        (" the </think> dog", "qwen3", Phase.AFTER, ("", " the </think> dog")),
        ("<think>fox", "qwen3", Phase.BEFORE, ("fox", "")),
        (" \n", "qwen3", Phase.BEFORE, ("", " \n")),
        ("[THINK]fox[/THINK]dog", "mistral", Phase.BEFORE, ("fox", "dog")),
        ("\n<seed:think>fox <s</seed:think>\ndog", "seed_oss", Phase.BEFORE, ("fox <s", "dog")),
        ("fox </seed:thin", "seed_oss", Phase.INSIDE, ("fox </seed:thin", "")),
        ("dog <seed:think>", "seed_oss", Phase.BEFORE, ("", "dog <seed:think>")),
        (HARMONY + "<|start|>assistant<|channel|>final<|message|>dog", "gpt_oss", Phase.BEFORE,
         ("Hm.\nWell.", "I look.dog")),
        ("no message", "gpt_oss", Phase.BEFORE, ("", "no message")),
    ],
)  # fmt: skip
def test_marks_are_found(text: str, name: str, phase: Phase, expected: tuple[str, str]) -> None:
    assert split(text, name, phase) == expected


def test_characters_of_a_mark_in_other_tokens_are_text() -> None:
    pieces = [token for char in "</think>" for token in ids_of(char, tagged())]
    reader = Reasoning("qwen3", tagged().vocabulary).reader(Phase.INSIDE, marks_calls=False)
    texts = [reader.feed(piece, tagged().vocabulary.whole_text(piece) or "")[0] for piece in pieces]
    assert "".join(texts) == "</think>"
    assert reader.is_inside


def test_calls_in_channels_are_marked_with_tools() -> None:
    called = HARMONY + '<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}'
    assert split(called, "gpt_oss", calls=True) == (
        "Hm.\nWell.", f'I look.{CALL}now{ARGUMENTS}{{"a": 1}}'
    )  # fmt: skip
    assert split(called + "<|call|>", "gpt_oss", calls=True)[1].endswith(CALL_END)
    assert split(called, "gpt_oss") == ("Hm.\nWell.", 'I look.{"a": 1}')


@pytest.mark.parametrize(
    ("prompt", "name", "continued", "phase"),
    [
        ("<|user|>hi<|end|><|assistant|>", "qwen3", False, Phase.BEFORE),
        ("<|user|>hi<|end|><|assistant|>", "deepseek_r1", False, Phase.INSIDE),
        ("<|assistant|><think>\n", "qwen3", False, Phase.INSIDE),
        ("<|assistant|><think>\n\n</think>\n\n", "deepseek_r1", False, Phase.AFTER),
        ("<think>a</think>b<|end|><|assistant|>", "qwen3", False, Phase.BEFORE),
        ("<|assistant|><think>the fox", "qwen3", True, Phase.INSIDE),
        ("<|assistant|>the fox", "qwen3", True, Phase.AFTER),
        ("<|start|>assistant", "gpt_oss", False, Phase.BEFORE),
        ("<|start|>assistant<|channel|>final<|message|>the", "gpt_oss", True, Phase.AFTER),
    ],
)
def test_a_prompt_may_open_reasoning_or_close_it(prompt: str, name: str, continued: bool, phase: Phase) -> None:
    reasoning = Reasoning(name, tagged().vocabulary)
    assert reasoning.phase(ids_of(prompt, tagged()), is_continued=continued) is phase


def test_formats_are_found_in_templates_and_need_their_tokens() -> None:
    assert format_of("{{ content.split('</think>')[-1] }}") == "qwen3"
    assert format_of("<|start|>assistant<|channel|>analysis<|message|>") == "gpt_oss"
    assert format_of("[THINK]{{ x }}[/THINK]") == "mistral"
    assert format_of("<|user|>{{ content }}") is None
    assert not Reasoning("gpt_oss", sentencepiece().vocabulary).is_usable
    assert Reasoning("seed_oss", byte_level().vocabulary).end_texts == ("</seed:think>",)


def test_a_reader_has_the_phase_of_its_prompt() -> None:
    reasoning = Reasoning("qwen3", tagged().vocabulary)
    assert AnswerReasoning(reasoning=reasoning, phase=Phase.INSIDE).reader().is_inside
    assert not AnswerReasoning(reasoning=reasoning, phase=Phase.AFTER).reader().is_inside
