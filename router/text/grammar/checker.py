"""Checks that grammars compile, in processes beside the gateway that can be killed.

    check ──▶ cached ──▶ answered immediately
          └─▶ its turn, of `MAX_AT_ONCE` ── a process compiles, within `CPU_S` and its memory ──▶ a result, or it dies
                └─▶ no request waits any more: dropped

The library limits most of its work itself. Work that it does not limit is stopped by its CPU time, so that the result
does not depend on the machine's load. A process (`checker_process`) is started when needed, and again after its death.
It may die of another cause than its grammar, so that grammar is compiled once more in a new process. If the result
stays uncertain, the client gets an error with a time to retry, and nothing is cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from protos.errors import InvalidRequest, Overloaded
from protos.grammars import in_our_words
from protos.limited.limited_process import PATIENCE_S, LimitedProcess, LimitedProcessEnded
from router.text.grammar import checker_process

MAX_GRAMMAR_CHARS = 128 * 1024
"""Characters of a grammar with its schemas: at this size it compiles in about a tenth of a second."""

MAX_CHECKED = 1024
MAX_AT_ONCE = 4
LARGE_CHARS, MAX_LARGE = 8192, 2
"""Grammars small enough not to delay others; this many are compiled at the same time."""
CPU_S = 1.0
WAIT_S = PATIENCE_S
"""A request that has waited this long is refused with a time to retry."""


class GrammarChecks:
    """Lives on one event loop. Caches results. `close` it at the end."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, str] = OrderedDict()
        self._asked: dict[bytes, _Asked] = {}
        self._turn, self._turn_of_large = asyncio.Semaphore(MAX_AT_ONCE), asyncio.Semaphore(MAX_LARGE)
        self._threads = ThreadPoolExecutor(max_workers=MAX_AT_ONCE, thread_name_prefix="grammar-checks")
        self._compilers = threading.local()

    async def check(self, grammar: str, *, param: str) -> None:
        """Raises InvalidRequest with what is wrong, Overloaded where that is not found out in `WAIT_S`."""
        if len(grammar) > MAX_GRAMMAR_CHARS:
            problem = f"'{param}' makes a grammar of {len(grammar)} characters"
            raise InvalidRequest(f"{problem}: at most {MAX_GRAMMAR_CHARS} are read", param=param)
        try:
            async with asyncio.timeout(WAIT_S):
                wrong = await self._wrong(grammar)
        except TimeoutError:
            problem = f"'{param}' was not compiled within {WAIT_S:g} s: come again"
            raise Overloaded(problem, param=param, retry_after_s=WAIT_S) from None
        except LimitedProcessEnded as ended:
            problem = f"'{param}' was not compiled, for what compiles it was ended ({ended}): come again"
            raise Overloaded(problem, param=param, retry_after_s=WAIT_S) from None
        if wrong:
            raise InvalidRequest(f"'{param}' cannot be enforced: {wrong}", param=param)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _wrong(self, grammar: str) -> str:
        encoded = grammar.encode("utf-8", "surrogatepass")
        name = hashlib.blake2b(encoded, digest_size=16).digest()
        if (wrong := self._found.get(name)) is not None:
            return wrong
        check = self._asked.get(name)
        if check is None:
            check = self._asked[name] = _Asked(asyncio.create_task(self._find(name, encoded)))
        check.num_waiting += 1
        try:
            return await asyncio.shield(check.result)
        finally:
            check.num_waiting -= 1
            if not check.num_waiting and not check.has_turn:
                check.result.cancel()
                self._asked.pop(name, None)

    async def _find(self, name: bytes, encoded: bytes) -> str:
        before = self._turn_of_large if len(encoded) > LARGE_CHARS else contextlib.nullcontext()
        async with before, self._turn:
            self._asked[name].has_turn = True
            try:
                wrong = await asyncio.get_running_loop().run_in_executor(self._threads, self._compiled, encoded)
            finally:
                del self._asked[name]
        self._found[name] = wrong
        if len(self._found) > MAX_CHECKED:
            self._found.popitem(last=False)
        return wrong

    def _compiled(self, encoded: bytes) -> str:
        """On a thread: the fault of the grammar, "" if none. Raises LimitedProcessEnded and TimeoutError if the result
        is uncertain."""
        with contextlib.suppress(LimitedProcessEnded):
            return self._ask(encoded)
        try:
            return self._ask(encoded)  # in a new process, whose death no earlier grammar can have caused
        except LimitedProcessEnded as ended:
            if ended.is_from_outside:
                raise
            return _blame(ended)

    def _ask(self, encoded: bytes) -> str:
        compiler: LimitedProcess | None = getattr(self._compilers, "one", None)
        if compiler is None:
            compiler = self._compilers.one = LimitedProcess(Path(checker_process.__file__))
        try:
            error_text = compiler.ask(encoded, CPU_S).decode("utf-8", "replace")
        except (LimitedProcessEnded, TimeoutError) as error:
            del self._compilers.one
            if isinstance(error, LimitedProcessEnded) and error.took_too_long:
                return _blame(error)
            raise
        return in_our_words(error_text)


@dataclass(slots=True, eq=False)
class _Asked:
    result: asyncio.Task[str]
    num_waiting: int = 0
    has_turn: bool = False


def _blame(ended: LimitedProcessEnded) -> str:
    match -ended.code:
        case signal.SIGPROF:
            return f"compiling it takes more than {CPU_S:g} s: intersect, nest or repeat fewer patterns"
        case signal.SIGSEGV | signal.SIGBUS:
            return "it is nested too deeply to be compiled: nest fewer patterns"
        case signal.SIGABRT:
            return "compiling it takes too much memory: intersect, nest or repeat fewer patterns"
    return f"compiling it ended the process ({ended}): make it simpler"
