"""Words of a request that resemble control texts: a template may look at them, and can make no control of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from protos.errors import InvalidRequest
from router.text.chat_template import ChatTemplate
from router.text.control import _CASED


@pytest.mark.parametrize(
    "look",
    [
        "word.startswith('end')", "word.startswith(('x', 'end'))", "word.endswith(word)", "'_Tu' in word",
        "word[:3] == 'end'", "word[0] in ['e']", "word <= 'end_Turn'", "word >= 'end_Turn'", "word.find('Turn') == 4",
        "word.count('n') == 2", "word.split('_')[0] == 'end'", "word.rsplit(sep='_')[-1] == 'Turn'",
        "'end' in word.partition('_')", "word.removeprefix('end_') == 'Turn'", "word.lower() == 'end_turn'",
        "word | lower == 'end_turn'", "word | upper == 'END_TURN'", "word | capitalize == 'End_turn'",
        "word | trim == 'end_Turn'", "word | string == 'end_Turn'", "word | first == 'e'", "word | last == 'n'",
        "word | replace('_', '-') == 'end-Turn'", "word.replace('end_', '') == 'Turn'", "word | length == 8",
        "word.swapcase() == 'END_tURN'", "word[3:].lstrip('_') == 'Turn'", "'end_Turn' == word", "word.isidentifier()",
        "(word[3:] | replace('_', '')).isalpha()", "not word.islower()", "word[:3] is lower", "word is not upper",
        "word in ['end_Turn']", "{'end_Turn': 1}[word]", "word in {'end_Turn': 1}", "word | list | length == 8",
        "['z', word] | sort | first == 'end_Turn'", "word.text is undefined",
    ],
)  # fmt: skip
def test_a_template_may_look_at_a_word_that_resembles_control(look: str) -> None:
    source = "{% set word = tools[0].function.name %}{% if LOOK %}<|start|>{% endif %}<|{{ word }}x|>".replace(
        "LOOK", look
    )
    template = ChatTemplate(source, added_tokens={"<|start|>": True, "<|end|>": True, "<|end_Turn|>": True})
    tools = [{"type": "function", "function": {"name": "end_Turn", "parameters": {}}}]
    rendered = template.rendered([{"role": "user", "content": "x"}], tools=tools)
    assert (rendered.text, rendered.written_controls()) == ("<|start|><|end_Turnx|>", ["<|start|>"])


def test_a_template_may_replace_content_resembling_control() -> None:
    shown = "m.content.replace('<image>', '<|image_pad|>').strip()"
    source = f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{{{{ {shown} }}}}{{% endfor %}}"
    template = ChatTemplate(source, added_tokens={"<|image_pad|>": True})
    rendered = template.rendered([{"role": "user", "content": "<image>"}])
    assert (rendered.text, rendered.written_controls()) == ("<|user|><|image_pad|>", ["<|image_pad|>"])


@pytest.mark.parametrize("look", ["text", "of(content, {})", "veils", "_text", "content.text"])
def test_no_attribute_reveals_a_veiled_word(look: str) -> None:
    source = "{% set content = messages[0].content %}<|{{ content.LOOK or '' }}|>".replace("LOOK", look)
    template = ChatTemplate(source, added_tokens={"<|end|>": True})
    with suppress(InvalidRequest):
        assert template.rendered([{"role": "user", "content": "end"}]).written_controls() == []


CASES: dict[str, Callable[[str], str]] = {
    "upper": str.upper, "lower": str.lower, "title": str.title, "upper | lower": lambda text: text.upper().lower(),
    "upper | capitalize": lambda text: text.upper().capitalize(),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_change_of_case_makes_no_control_of_content(case: str) -> None:
    """Every character that becomes an ASCII letter, or several: a ligature of s and t, a dotless i, a Kelvin."""
    changed = {char: made for char in map(chr, range(0x80, 0x110000)) if (made := CASES[case](char)) != char}
    letters = {
        char: made
        for char, made in changed.items()
        if any(character.isascii() and character.isalpha() for character in made)
    }
    assert {"upper": "\ufb06", "lower": "\u212a", "title": "\u00df"}.get(case, "\u0131") in letters
    for char, made in letters.items():
        for word in ("messages[0].content", "(messages[0].content ~ '')"):
            template = ChatTemplate(f"<|{{{{ {word} | {case} }}}}|>", added_tokens={f"<|{made}|>": True})
            assert template.rendered([{"role": "user", "content": char}]).written_controls() == []


def test_no_character_with_a_case_is_overlooked() -> None:
    above = "".join(map(chr, range(_CASED.stop, 0x110000)))
    assert above.upper() == above == above.lower()
