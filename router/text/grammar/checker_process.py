"""Checks whether grammars compile, in a process that a grammar may kill (`checker`): a grammar in, its fault out.

A script of `protos.limited`, without imports from this project.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_TOLD_CHARS = 1000  # characters of a fault: the library may quote the whole grammar

# Parts of a Lark grammar: texts, patterns and comments, or a token by its number.
_NUMBERED = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?://|#)[^\n]*|(?P<token><\[[^\]>]*\]>)')


class _Bytes:
    """A tokenizer for the library in which each byte is a token, without special tokens, so that a grammar that names
    one is refused. The library's own tokenizer of bytes has names that models use."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), "<\ufdd0>".encode())  # the library fails where there is no name
    special_token_ids = (eos_token_id,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def numbered_token(grammar: str) -> str:
    """The fault of a grammar that names a token by its number (`<[12]>`, `<[^1-4]>`, `<[*]>`); "" without one. The
    library takes each number for a text token, even a control token's."""
    from llguidance import LLMatcher

    if "<[" not in grammar and "\\u" not in grammar:  # a list of grammars is JSON, which may escape the brackets
        return ""
    _, warnings = LLMatcher.validate_grammar_with_warnings(grammar)  # without a tokenizer it names each such token
    if not any("can't validate <" in warning for warning in warnings):
        return ""
    token = next((match["token"] for match in _NUMBERED.finditer(grammar) if match["token"]), "<[...]>")
    return f"token by number: {token}"


def make_answer() -> Callable[[bytes], bytes]:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    tokenizer, limits = LLTokenizer(TokenizerWrapper(_Bytes())), LLParserLimits(verbose_errors=False)

    def answer(request: bytes) -> bytes:
        grammar = request.decode("utf-8", "surrogatepass")
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return (matcher.get_error() or numbered_token(grammar))[:MAX_TOLD_CHARS].encode("utf-8", "replace")

    return answer
