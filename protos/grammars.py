"""Translates llguidance's errors: what is wrong with a grammar, and what to do about it."""

from __future__ import annotations

import re

from llguidance import LLParserLimits

MAX_TOLD_CHARS = 1000
"""Characters of the library's message, which may quote the whole grammar."""

_LIMITS = LLParserLimits()
_TOO_MUCH_TO_READ = (
    f"its patterns take more than {_LIMITS.initial_lexer_fuel:,} steps to read (initial_lexer_fuel): make them "
    "simpler, or bound their repetitions"
)
_FIXES = {
    "fuel exhausted": _TOO_MUCH_TO_READ,
    "initial_lexer_fuel": _TOO_MUCH_TO_READ,
    "max_grammar_size": (
        f"it has more than {_LIMITS.max_grammar_size:,} symbols (max_grammar_size): give fewer rules or properties"
    ),
    "too many expressions": (
        f"its patterns unfold into more than {_LIMITS.step_lexer_fuel:,} parts at one token (step_lexer_fuel): bound "
        "their repetitions"
    ),
    "too many states": (
        f"its patterns have more than {_LIMITS.max_lexer_states:,} states (max_lexer_states): bound their repetitions"
    ),
    "Too many items": (
        f"choosing a token takes more than {_LIMITS.step_max_items:,} steps of parsing (step_max_items): write runs of "
        "characters as a terminal, such as /[a-z]+/, rather than as rules of single ones"
    ),
    "Current row has": (
        f"more than {_LIMITS.max_items_in_row:,} rules are possible at one place (max_items_in_row): make it less "
        "ambiguous, or nest and repeat fewer of them"
    ),
    "incompatible types": "no value can satisfy it (type, const, enum, allOf): make them agree",
    "oneOf constraints": "oneOf cannot be enforced where a value may fit two alternatives: write anyOf",
    "NoExtensionBias": "it refers only to itself, so that no text is ever complete: give it an end",
}


_SPECIAL = re.compile(r'unknown special token: "([^"]{1,100})')
_KEYS = re.compile(r"Unimplemented keys: \[(.{1,200}?)\]")
_NUMBERED = re.compile(r"token by number: (.{1,100})")


def in_our_words(error: str) -> str:
    error = error.replace("<non-verbose/>", "").strip()
    if (special := _SPECIAL.search(error)) is not None:
        return (
            f"it names the special token {special[1]}: an answer is text, and ends by itself where its grammar "
            "is complete. Put the name in double quotes for its text, or leave it out"
        )
    if (numbered := _NUMBERED.search(error)) is not None:
        return (
            f"it names a token by its number, {numbered[1]}: an answer is text. Write the text in double quotes, or "
            "leave the token out"
        )
    if (keys := _KEYS.search(error)) is not None:
        return (
            f'these keywords of JSON Schema cannot be enforced: {keys[1]}: leave them out, or ask with "strict": false'
        )
    return next((fix for sign, fix in _FIXES.items() if sign in error), error[:MAX_TOLD_CHARS])
