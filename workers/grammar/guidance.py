"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): Lark with JSON Schemas in it (`%json`).

    engine's thread     begin                                                                      allowed
    other threads         └──▶ compiled ──▶ matcher of the request ──▶ takes tokens, makes a mask ──┘
                                                                              └─ in MAX_MASK_S, or the request ends

The cost of a grammar shows only while it is used: a token of a grammar of 50 characters took a tenth of a second, one
of a grammar of 6 kB half a second. So there are four kinds of threads: for new grammars, for large new ones, for
requests whose last mask was fast, and for the others. A fast request never waits for a slow one. The threads may use
every core of the process, not only the core of the engine's thread, which starts them; all but those of fast requests
have a lower priority than the engine.

The library counts the work of a mask, stops at a limit, and releases the interpreter's lock meanwhile. Work within the
limit may take ten seconds of a core and more, so time is bounded as well. A thread cannot be killed: others replace
those that are stuck."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import ref

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from protos.errors import BadCheckpoint, InvalidRequest
from protos.grammars import in_our_words
from protos.model_files.files_seam import ModelFiles
from workers.batch import Sample
from workers.cores import leave_cores
from workers.grammar.grammar_seam import Mask, without

log = logging.getLogger("baton.worker")

MAX_COMPILED = 64
MAX_COMPILED_CHARS = 2**20
PATIENCE_S = 0.005
"""A step waits at most this long for all its masks together. A mask that takes longer is slow."""
MAX_MASK_S = 2.0
"""CPU time of a thread for one mask, so that a busy host does not cause refusals."""
WATCH_S = 0.25
LARGE_CHARS = 8192
"""Longer grammars compile on threads of their own: a pattern of 26,000 took 0.7 s, most of 8,000 0.1 s."""
NICE = 10
"""Niceness of threads that no next token waits for: a tenth of a computing thread's share of a core."""
_TOO_LONG = (
    f"the answer cannot follow its grammar: choosing a token takes more than {MAX_MASK_S:g} s of CPU time (MAX_MASK_S)"
    ": make it less ambiguous, so that a text can be read in one way only, and let fewer rules nest and repeat"
)

_LIMITS = LLParserLimits(verbose_errors=False)  # an error would quote the state of the parser


@dataclass(slots=True, eq=False)
class _Compiled:
    """A grammar's first matcher, to be copied while it has users. Copies share a lock: once a mask is `endless`, others
    would wait for it, and end as well."""

    matcher: Future[LLMatcher]
    num_users: int = 0
    endless: bool = False


class _Making(NamedTuple):
    """A mask in progress: the clock of its thread's CPU time, the clock's value at the start, and the thread."""

    compiled: _Compiled
    clock: int
    since_s: float
    pool: str


@dataclass(slots=True, eq=False)
class _Standing:
    """A request's matcher, which has consumed `seen`, and its mask after `output_ids`, once `made`. One thread at a
    time uses the matcher: the next mask is requested after the previous one was used."""

    grammar: str
    compiled: _Compiled
    output_ids: tuple[int, ...] = ()
    made: Future[Mask] = field(default_factory=Future)
    matcher: LLMatcher | None = None
    seen: int = 0
    slow: bool = False
    further: Future[list[Mask]] | None = None  # the masks after drafts

    def leads_to(self, grammar: str, output_ids: tuple[int, ...]) -> bool:
        is_whole = all(each is None or (each.done() and each.exception() is None) for each in (self.made, self.further))
        return is_whole and self.grammar == grammar and self.output_ids == output_ids[: len(self.output_ids)]


class GuidanceGrammars:
    """Reads the model's tokenizer.json for the texts of its tokens. `vocab_size` is the model's: tokens that the
    tokenizer does not know are never allowed. `eos_ids` end an answer whose grammar is fulfilled."""

    def __init__(self, files: ModelFiles, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.listener: Callable[[], None] = lambda: None
        self._files = files
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._num_chars = 0
        self._standing: dict[str, _Standing] = {}
        self._late: set[str] = set()
        self._patience_s = PATIENCE_S
        self._threads = {
            name: DeepThreads(f"grammars-{name}", num, partial(leave_cores, niceness))
            for name, num, niceness in (("new", 2, NICE), ("large", 1, NICE), ("quick", 2, 0), ("slow", 1, NICE))
        }
        self._making: dict[Future[Any], _Making] = {}  # the function that removes a future handles its error
        self._watch: threading.Thread | None = None
        self._takers = threading.local()
        self._tokenizer: Future[LLTokenizer] | None = None
        if self._eos_ids and files.has("tokenizer.json"):
            self._tokenizer = self._threads["new"].submit(self._read)

    def begin(self, request_id: str, grammar: str, output_ids: tuple[int, ...]) -> None:
        if not self._eos_ids:
            raise InvalidRequest("this model has no end-of-sequence token: its answers cannot be constrained")
        if self._tokenizer is None:
            where = self._files.where("tokenizer.json")
            raise InvalidRequest(f"{where} is missing: this worker cannot constrain answers", param="grammar")
        standing = self._standing.get(request_id)
        if standing is None or not standing.leads_to(grammar, output_ids):
            self._begin_anew(request_id, grammar, output_ids)
            return
        standing.output_ids, standing.made, standing.further = output_ids, Future(), None
        if standing.slow:
            self._late.add(request_id)
        pool = "slow" if standing.slow else "quick"
        self._threads[pool].submit(self._make, standing, standing.made, pool)

    def pending(self) -> Collection[str]:
        self._patience_s = PATIENCE_S
        if self._late:
            self._late = {name for name in self._late if not self._standing[name].made.done()}
        return self._late

    def allowed(self, request_id: str, sample: Sample) -> Mask | None:
        standing = self._standing.get(request_id)
        grammar, output_ids = sample.params.grammar, sample.output_ids
        if standing is None or (standing.grammar, standing.output_ids) != (grammar, output_ids):
            self.begin(request_id, grammar, output_ids)
            standing = self._standing[request_id]
        if not standing.made.done() and not self._waited(standing.made):
            self._late.add(request_id)
            return None
        return without(standing.made.result(), sample.banned_ids)

    def draft(self, request_id: str, draft_ids: tuple[int, ...]) -> None:
        standing = self._standing[request_id]
        before = standing.further or standing.made  # drafts of a step that came early may still be in work
        standing.further = further = Future[list[Mask]]()
        wanted = () if standing.slow else draft_ids
        before.add_done_callback(
            lambda _: self._threads["quick"].submit(self._make_further, standing, before, further, wanted)
        )

    def allowed_after(self, request_id: str, samples: Sequence[Sample]) -> Sequence[Mask]:
        further = self._standing[request_id].further
        if further is None or not (further.done() or self._waited(further)) or further.exception() is not None:
            return ()
        return [without(mask, each.banned_ids) for mask, each in zip(further.result(), samples[1:], strict=False)]

    def release(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            standing = self._standing.pop(request_id, None)
            self._late.discard(request_id)
            if standing is not None:
                standing.made.cancel()
                self._give_up(standing)

    def __len__(self) -> int:
        return len(self._standing)

    def _begin_anew(self, request_id: str, grammar: str, output_ids: tuple[int, ...]) -> None:
        compiled = self._compile(grammar)
        compiled.num_users += 1
        self.release([request_id])
        standing = self._standing[request_id] = _Standing(grammar=grammar, compiled=compiled, output_ids=output_ids)
        self._late.add(request_id)
        made, pool = standing.made, _newcomers(grammar)
        if self._watch is None:
            self._watch = threading.Thread(target=_watch, args=(ref(self),), name="grammars-watch", daemon=True)
            self._watch.start()
        compiled.matcher.add_done_callback(
            lambda matcher: self._threads[pool].submit(self._make, standing, made, pool, matcher)
        )

    def _waited(self, made: Future[Any]) -> bool:
        start_s = time.perf_counter()
        wait([made], timeout=max(0.0, self._patience_s))
        self._patience_s -= time.perf_counter() - start_s
        return made.done()

    def _give_up(self, gone: _Standing) -> None:
        """Cancels the compilation of an unused grammar if it has not begun."""
        compiled = gone.compiled
        compiled.num_users -= 1
        if compiled.num_users or not compiled.matcher.cancel():
            return
        if self._compiled.get(gone.grammar) is compiled:
            del self._compiled[gone.grammar]
            self._num_chars -= len(gone.grammar)

    def _compile(self, grammar: str) -> _Compiled:
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = _Compiled(self._threads[_newcomers(grammar)].submit(self._matcher, grammar))
            self._num_chars += len(grammar)
        self._compiled[grammar] = compiled
        while len(self._compiled) > 1 and (len(self._compiled) > MAX_COMPILED or self._num_chars > MAX_COMPILED_CHARS):
            self._num_chars -= len(self._compiled.popitem(last=False)[0])
        return compiled

    # -- on other threads ----------------------------------------------------------------------------------------------

    def _make(
        self, standing: _Standing, made: Future[Mask], pool: str, compiled: Future[LLMatcher] | None = None
    ) -> None:
        if not made.set_running_or_notify_cancel():
            return
        mask, failure = None, None
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self._making[made] = _Making(standing.compiled, clock, time.thread_time(), pool)
        try:
            if standing.compiled.endless:
                raise InvalidRequest(_TOO_LONG, param="grammar")
            if compiled is not None:
                standing.matcher = compiled.result().deep_copy()
            mask = self._mask(standing)
        except InvalidRequest as error:
            failure = error
        except BaseException as error:  # of the compiled library: it fails one request
            log.exception("a grammar failed")
            failure = InvalidRequest(f"the answer cannot follow its grammar: {error}", param="grammar")
        if self._making.pop(made, None) is None:
            return  # too late
        if mask is not None:
            made.set_result(mask)
        else:
            made.set_exception(failure)
        self.listener()

    def _make_further(
        self, standing: _Standing, before: Future[Any], further: Future[list[Mask]], draft_ids: tuple[int, ...]
    ) -> None:
        """Computes the masks after drafts, up to the first that the grammar forbids. The matcher returns to the output;
        if its last use `before` failed, this fails too."""
        if not further.set_running_or_notify_cancel():
            return
        masks, failure, num_taken = list[Mask](), None, 0
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self._making[further] = _Making(standing.compiled, clock, time.thread_time(), "quick")
        try:
            if (failure := before.exception()) is not None:
                draft_ids = ()
            matcher, mask = standing.matcher, standing.made.result()
            assert matcher is not None
            for draft_id in draft_ids:
                if not mask[draft_id // 32] >> (draft_id % 32) & 1:
                    break
                self._take(matcher, [draft_id])
                num_taken += 1
                mask = self._mask_of(matcher)
                masks.append(mask)
        except InvalidRequest:
            log.debug("a grammar ends behind a draft")  # the token itself may come, and the next step reports it
        except BaseException as error:  # of the compiled library
            failure = error
        if failure is None and num_taken and (standing.matcher is None or not standing.matcher.rollback(num_taken)):
            failure = InvalidRequest("the grammar cannot go back before its drafts", param="grammar")
        if self._making.pop(further, None) is None:
            return  # too late
        if failure is None:
            further.set_result(masks)
        else:
            further.set_exception(failure)

    def end_overdue(self, max_s: float = MAX_MASK_S) -> None:
        """Ends requests whose masks have taken `max_s` of CPU time, and all requests with the same grammar."""
        begun = list(self._making.items())
        for _, making in begun:
            if time.clock_gettime(making.clock) - making.since_s >= max_s:
                making.compiled.endless = True
        for made, making in begun:
            if not making.compiled.endless or self._making.pop(made, None) is None:
                continue
            log.warning("a grammar's mask has taken %g s: its request ends", max_s)
            self._threads[making.pool] = self._threads[making.pool].successor()
            made.set_exception(InvalidRequest(_TOO_LONG, param="grammar"))
            self.listener()

    def _mask(self, standing: _Standing) -> Mask:
        matcher, start_s = standing.matcher, time.perf_counter()
        assert matcher is not None
        fresh, standing.seen = standing.output_ids[standing.seen :], len(standing.output_ids)
        self._take(matcher, fresh)
        mask = self._mask_of(matcher)
        standing.slow = time.perf_counter() - start_s > PATIENCE_S * max(1, len(fresh))
        return mask

    def _mask_of(self, matcher: LLMatcher) -> Mask:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32) if not matcher.is_error() else None
        is_whole = mask is not None and not matcher.is_error()  # the library ends an answer at its own limits
        if mask is not None and is_whole and self._ends(mask) and not matcher.is_accepting():
            mask = self._without_end(mask)
        if mask is None or not is_whole or not mask.any():
            wrong = in_our_words(matcher.get_error())
            raise InvalidRequest(f"the answer cannot follow its grammar: {wrong}", param="grammar")
        return mask

    def _ends(self, mask: Mask) -> bool:
        return any(mask[each // 32] >> (each % 32) & 1 for each in self._eos_ids)

    def _without_end(self, mask: Mask) -> Mask:
        """Raises InvalidRequest for a grammar that names the end-of-sequence token by its id."""
        allowed = mask.copy()
        for each in self._eos_ids:
            allowed[each // 32] &= ~np.array(1 << (each % 32), dtype=np.uint32).view(np.int32)
        if not allowed.any():
            raise InvalidRequest(
                f"the grammar names a token that ends an answer ({', '.join(map(str, self._eos_ids))}): leave it out",
                param="grammar",
            )
        return allowed

    def _take(self, matcher: LLMatcher, token_ids: Sequence[int]) -> None:
        """The library releases the GIL for several matchers but not for one, so an empty one is added. Otherwise a
        client's grammar could hold up the engine."""
        assert self._tokenizer is not None
        if not hasattr(self._takers, "executor"):
            self._takers.executor = LLExecutor(1)
            self._takers.other = LLMatcher(self._tokenizer.result(), "no grammar", log_level=0)
        for token_id in token_ids:
            if not self._takers.executor.consume_token_par([(matcher, token_id), (self._takers.other, token_id)])[0]:
                return

    def _matcher(self, grammar: str) -> LLMatcher:
        assert self._tokenizer is not None
        matcher = LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidRequest(f"it cannot be compiled: {in_our_words(matcher.get_error())}", param="grammar")
        return matcher

    def _read(self) -> LLTokenizer:
        where = self._files.where("tokenizer.json")
        try:
            content = self._files.text("tokenizer.json")
            return LLTokenizer(without_specials(content or ""), n_vocab=self._vocab_size, eos_token=self._eos_ids)
        except (BadCheckpoint, ValueError) as error:
            log.warning("answers cannot be constrained: %s: %s", where, error)
            raise InvalidRequest(f"this worker cannot constrain answers: {error}", param="grammar") from error


def _newcomers(grammar: str) -> str:
    """The pool of threads for a new grammar."""
    return "large" if len(grammar) > LARGE_CHARS else "new"


def without_specials(tokenizer: str) -> str:
    """Returns tokenizer.json with unguessable names for its special tokens, so that no text of a grammar is one.
    Otherwise the library would use a special token for its text, and a grammar could name it. Masks hold token ids,
    which do not depend on names."""
    state, secret = json.loads(tokenizer), secrets.token_hex(16)
    names = {each["content"]: f"\ufdd0{secret}{each['id']}\ufdd1" for each in state["added_tokens"] if each["special"]}
    for each in state["added_tokens"]:
        each["content"] = names.get(each["content"], each["content"])
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(word, word): token_id for word, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(word, word), *rest] for word, *rest in model["vocab"]]
    if "merges" in model:
        pairs = (each.split(" ") if isinstance(each, str) else each for each in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if names.keys().isdisjoint((a, b, a + b))]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = names.get(unknown, unknown)
    state["post_processor"] = None
    return json.dumps(state)


def _watch(watched: ref[GuidanceGrammars]) -> None:
    """Runs on a thread of its own while there are requests."""
    while (grammars := watched()) is not None:
        grammars.end_overdue()
        del grammars
        time.sleep(WATCH_S)


STACK_BYTES = 256 * 2**20
"""Bytes of address space, not of memory. A level of a JSON Schema took 4 KiB of stack to compile, and has ten
characters."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_starting = threading.Lock()  # the setting is the process's; no work is submitted while successors take over


class DeepThreads(ThreadPoolExecutor):
    """`num` threads. Compiled code that runs out of a usual stack ends its whole process."""

    def __init__(self, name: str, num: int = 1, begin: Callable[[], None] | None = None) -> None:
        """Starts the threads at once, so that they inherit this thread's priority. `begin` is called on each thread
        before anything else."""
        super().__init__(max_workers=num, thread_name_prefix=name, initializer=begin)
        self._name, self._num, self._begin = name, num, begin
        self._next: DeepThreads | None = None
        started = threading.Event()  # a thread that is still busy takes no second task, so each task starts a thread
        try:
            for _ in range(num):
                self.submit(started.wait)
        finally:
            started.set()

    def successor(self) -> DeepThreads:
        """Starts as many new threads, which take over the queue. A thread that still works finishes its work and
        ends."""
        other = DeepThreads(self._name, self._num, self._begin)
        with _starting, suppress(Empty):
            self._next = other
            while True:
                other._work_queue.put(self._work_queue.get_nowait())
        return other

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        with _starting:
            others = self._next
            if others is None:
                before = threading.stack_size(STACK_BYTES)
                try:
                    return super().submit(fn, *args, **kwargs)
                finally:
                    threading.stack_size(before)
        return others.submit(fn, *args, **kwargs)
