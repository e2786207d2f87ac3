"""A process that checks whether grammars compile, one after the other; a grammar may kill it (`checker`).

Run as a script without imports from this project: it starts in a tenth of a second. Its standard input is a socket::

    ready         length 0
    request       length, CPU time that may be taken in ms, grammar
    answer        length, its fault
"""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import struct
import sys
import threading

STACK_BYTES = 256 * 2**20  # as in `workers.grammar.deep_threads`
MAX_MEMORY_BYTES = 2 * 2**30
MAX_TOLD_CHARS = 1000  # characters of a fault: the library may quote the whole grammar
NICE = 10  # lower priority than processes that compute tokens
HEAD, ANSWER = struct.Struct("!II"), struct.Struct("!I")

# Parts of a Lark grammar: texts, patterns and comments, or a token by its number.
_NUMBERED = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?://|#)[^\n]*|(?P<token><\[[^\]>]*\]>)')


class _Bytes:
    """A tokenizer for the library: each byte is a token. It knows no special token, so that a grammar that names one is
    refused: the library's own tokenizer of bytes knows names that models use."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), "<\ufdd0>".encode())  # the library fails where there is no name
    special_token_ids = (eos_token_id,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def numbered_token(grammar: str) -> str:
    """The fault of a grammar that compiles but names a token by its number (`<[12]>`, `<[^1-4]>`, `<[*]>`): the library
    takes each number for a token of text, also that of a control token. "" if it names none."""
    from llguidance import LLMatcher

    if "<[" not in grammar and "\\u" not in grammar:  # a list of grammars is JSON, which may escape them
        return ""
    _, warnings = LLMatcher.validate_grammar_with_warnings(grammar)  # without a tokenizer it names each such token
    if not any("can't validate <" in one for one in warnings):
        return ""
    found = next((one["token"] for one in _NUMBERED.finditer(grammar) if one["token"]), "<[...]>")
    return f"token by number: {found}"


def main() -> None:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    known, limits = LLTokenizer(TokenizerWrapper(_Bytes())), LLParserLimits(verbose_errors=False)
    connection = socket.socket(fileno=0)
    stream = connection.makefile("rb")
    connection.sendall(ANSWER.pack(0))
    while head := stream.read(HEAD.size):
        num_bytes, cpu_ms = HEAD.unpack(head)
        grammar = stream.read(num_bytes).decode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, cpu_ms / 1000)  # its signal ends the process
        matcher = LLMatcher(known, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        reply = (matcher.get_error() or numbered_token(grammar))[:MAX_TOLD_CHARS].encode("utf-8", "replace")
        del matcher
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(ANSWER.pack(len(reply)) + reply)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    deep = threading.Thread(target=main, daemon=True)
    deep.start()
    deep.join()
    sys.exit(0)
