"""Whether grammars can be compiled, found out in processes beside the gateway, which can be ended.

    check ──▶ found before ──▶ said at once
          └─▶ a thread of `MAX_AT_ONCE` ── its process compiles, within `CPU_S` and its memory ──▶ found, or dead of it

The library counts most of the work and stops by itself. What it counts too little of is stopped by the CPU time that it
takes, so that neither depends on how busy the machine is. A process (`router.text.compiling`) is started when it is
needed, and again when it has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protos.errors import InvalidRequest, Overloaded
from router.text import compiling

log = logging.getLogger(__name__)

MAX_GRAMMAR_CHARS = 128 * 1024
"""Of a grammar with all its schemas: one of this size compiles in about a tenth of a second."""

MAX_CHECKED = 1024
MAX_AT_ONCE = 4
CPU_S = 1.0
WAIT_S = 10.0
"""Whoever has waited so long, with others before, is to come again."""

_FIXES = {
    "fuel exhausted": "its patterns take more than 1,000,000 steps to read (initial_lexer_fuel): make them simpler, or "
    "bound their repetitions",
    "initial_lexer_fuel": "its patterns take more than 1,000,000 steps to read (initial_lexer_fuel): make them "
    "simpler, or bound their repetitions",
    "too many expressions": "its patterns unfold into more than 200,000 parts at one token (step_lexer_fuel): bound "
    "their repetitions",
    "max_grammar_size": "it has more than 500,000 symbols (max_grammar_size): give fewer rules or properties",
}


class GrammarChecks:
    """Of one event loop. What was found is remembered."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, asyncio.Future[str]] = OrderedDict()
        self._threads = ThreadPoolExecutor(max_workers=MAX_AT_ONCE, thread_name_prefix="grammar-checks")
        self._compilers = threading.local()

    async def check(self, grammar: str, *, param: str) -> None:
        """Raises InvalidRequest with what is wrong, Overloaded where that is not found out in `WAIT_S`."""
        if len(grammar) > MAX_GRAMMAR_CHARS:
            told = f"'{param}' makes a grammar of {len(grammar)} characters"
            raise InvalidRequest(f"{told}: at most {MAX_GRAMMAR_CHARS} are read", param=param)
        try:
            async with asyncio.timeout(WAIT_S):
                wrong = await asyncio.shield(self._wrong(grammar))
        except TimeoutError:
            told = f"'{param}' was not compiled within {WAIT_S:g} s, for others were before it: come again"
            raise Overloaded(told, param=param, retry_after_s=WAIT_S) from None
        if wrong:
            raise InvalidRequest(f"'{param}' cannot be enforced: {wrong}", param=param)

    def _wrong(self, grammar: str) -> asyncio.Future[str]:
        encoded = grammar.encode("utf-8", "surrogatepass")
        name = hashlib.blake2b(encoded, digest_size=16).digest()
        found = self._found.get(name)
        if found is None or (found.done() and found.exception() is not None):
            found = asyncio.get_running_loop().run_in_executor(self._threads, self._compiled, encoded)
            self._found[name] = found
            if len(self._found) > MAX_CHECKED:
                self._found.popitem(last=False)
        return found

    def _compiled(self, encoded: bytes) -> str:
        """On a thread: what is wrong, "" if nothing is."""
        compiler: _Compiler | None = getattr(self._compilers, "one", None)
        if compiler is None:
            compiler = self._compilers.one = _Compiler()
        try:
            return _in_our_words(compiler.ask(encoded))
        except _Died as died:
            del self._compilers.one
            return died.told


class _Died(Exception):
    def __init__(self, told: str) -> None:
        super().__init__(told)
        self.told = told


class _Compiler:
    """A process, which ends with this object. Raises RuntimeError if it cannot be started."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", str(Path(compiling.__file__))]
            devnull = subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=devnull, stderr=devnull)
        weakref.finalize(self, _end, self._process, self._ours)
        if self._read() != b"":
            raise RuntimeError(f"the process that checks grammars does not start: {command}")

    def ask(self, grammar: bytes) -> str:
        """Raises _Died with what the grammar has done to it."""
        with contextlib.suppress(OSError):  # if it has died, reading says so
            self._ours.sendall(compiling.HEAD.pack(len(grammar), round(CPU_S * 1000)) + grammar)
        told = self._read()
        if told is not None:
            return told.decode("utf-8", "replace")
        _end(self._process, self._ours)
        log.warning(
            "a grammar of %d bytes ended the process that compiled it: %s", len(grammar), self._process.returncode
        )
        if self._process.returncode == -signal.SIGPROF:
            raise _Died(f"compiling it takes more than {CPU_S:g} s: intersect, nest or repeat fewer patterns")
        raise _Died("compiling it takes too much memory: intersect, nest or repeat fewer patterns")

    def _read(self) -> bytes | None:
        """An answer; None when it has died."""
        parts = bytearray()
        missing = compiling.ANSWER.size
        while len(parts) < missing:
            try:
                part = self._ours.recv(missing - len(parts))
            except OSError:
                return None
            if not part:
                return None
            parts += part
            if len(parts) == compiling.ANSWER.size:
                missing += compiling.ANSWER.unpack(parts)[0]
        return bytes(parts[compiling.ANSWER.size :])


def _end(process: subprocess.Popen[bytes], ours: socket.socket) -> None:
    ours.close()
    if process.returncode is None:
        try:
            process.wait(timeout=0.5)  # what has died says of what
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _in_our_words(told: str) -> str:
    told = told.replace("<non-verbose/>", "").strip()
    return next((fix for sign, fix in _FIXES.items() if sign in told), told)
