"""Sessions of simulated clients, recorded or generated from a seed."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from cluster.bench.bench_load import Lengths, PrefixSpan, WorkloadItem, read_trace
from cluster.simulate.world.clock import MAX_SPAN_S
from protos.errors import Misconfigured
from protos.hints import counted

_OWN, _SYSTEM, _DOCUMENT, _ANSWERED = 10, 11, 12, 13  # kinds of spans; the bench has 0 and 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    """`pause_s` passes before this turn, `read_s` after each message to its client."""

    spans: tuple[PrefixSpan, ...]
    num_output: int
    pause_s: float = 0.0
    read_s: float = 0.0
    prompt_logprobs: bool = False

    @property
    def num_added(self) -> int:
        return sum(span.num_tokens for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSession:
    """The first turn is sent `due_s` after the start. Sessions of different tenants share no cached block."""

    number: int
    due_s: float
    turns: tuple[SessionTurn, ...]
    tenant: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of the last turn's prompt and answer."""
        return sum(turn.num_added + turn.num_output for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedLoad:
    """`rate`: mean requests a second."""

    num_requests: int
    rate: float
    prompts: Lengths
    outputs: Lengths
    seed: int = 0

    def __post_init__(self) -> None:
        least = self.num_requests / MAX_SPAN_S
        if self.num_requests < 1 or not least <= self.rate < math.inf:
            raise Misconfigured(
                f"workload.rate = {self.rate:g} with workload.requests = {self.num_requests}: give at least 1 request, "
                f"and {least * 1.05:.2g} or more a second: {_NOT_SKIPPED}",
                param="workload.rate",
            )


def recorded(path: Path, *, limit: int | None = None, speed: float = 1.0, scale: float = 1.0) -> list[UserSession]:
    """Reads a trace in Mooncake's format; its time runs `speed` times as fast. Raises Misconfigured."""
    sessions = [_alone(item) for item in read_trace(path, limit=limit, scale=scale, speed=speed)]
    if (span_s := sessions[-1].due_s) > MAX_SPAN_S:
        num_before = sum(session.due_s <= MAX_SPAN_S for session in sessions)
        raise Misconfigured(
            f"trace {path}: its last request comes after {span_s / 86_400:,.0f} days: {_NOT_SKIPPED}. Give "
            f"workload.requests = {num_before} or trace_speed = {speed * span_s / MAX_SPAN_S * 1.05:.2g}",
            param="workload.trace",
        )
    return sessions


_NOT_SKIPPED = f"idle time is simulated second by second, and {MAX_SPAN_S / 86_400:.0f} days are the most"


def _alone(item: WorkloadItem) -> UserSession:
    return UserSession(
        number=item.index, due_s=item.due_s or 0.0, turns=(SessionTurn(spans=item.spans, num_output=item.num_output),)
    )


# -- arrivals ----------------------------------------------------------------------------------------------------------

Pace = Callable[[float], float]
"""The arrival rate at a time over its mean; at most `_PEAK`."""

_PEAK = 4.0


def steady(at_s: float) -> float:
    return 1.0


def bursty(at_s: float) -> float:
    """Ten seconds of every minute have four times the rate, the others 0.4 times."""
    return _PEAK if at_s % 60 < 10 else 0.4


def diurnal(at_s: float) -> float:
    """A day in ten minutes, from almost no requests to twice the mean."""
    return 1.0 - 0.95 * math.cos(2 * math.pi * at_s / 600)


def arrivals(rate: float, pace: Pace, rng: random.Random) -> Iterator[float]:
    """The times of an inhomogeneous Poisson process, by thinning: Lewis and Shedler (1979)."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate * _PEAK)
        if rng.random() * _PEAK < pace(at_s):
            yield at_s


# -- requests ----------------------------------------------------------------------------------------------------------


def independent(load: GeneratedLoad, pace: Pace) -> list[UserSession]:
    rng = random.Random(f"{load.seed} independent")
    due = arrivals(load.rate, pace, rng)
    return [
        UserSession(number=number, due_s=next(due), turns=(_turn(_OWN, number, load, rng),))
        for number in range(load.num_requests)
    ]


def conversations(load: GeneratedLoad, *, num_turns: int = 5, pause_s: float = 8.0) -> list[UserSession]:
    """Later turns add a fifth of a prompt's length. Users pause for `pause_s` on average."""
    rng = random.Random(f"{load.seed} conversations")
    due = arrivals(load.rate / num_turns, steady, rng)
    sessions = []
    for number in range(-(-load.num_requests // num_turns)):
        first = _turn(_OWN, number * 1000, load, rng)
        short = replace(load, prompts=_part(load.prompts, 5))
        later = [
            replace(_turn(_OWN, number * 1000 + k, short, rng), pause_s=rng.expovariate(1 / pause_s))
            for k in range(1, num_turns)
        ]
        sessions.append(UserSession(number=number, due_s=next(due), turns=(first, *later)))
    return sessions


def agents(
    load: GeneratedLoad, *, num_systems: int = 8, system_tokens: int = 4096, num_turns: int = 4
) -> list[UserSession]:
    """Sessions of a few kinds of agents, each with its own long system prompt. Tools answer within a second."""
    rng = random.Random(f"{load.seed} agents")
    due = arrivals(load.rate / num_turns, steady, rng)
    sessions = []
    for number in range(-(-load.num_requests // num_turns)):
        system = PrefixSpan(key=(_SYSTEM, rng.randrange(num_systems)), num_tokens=system_tokens)
        turns = [
            replace(_turn(_OWN, number * 1000 + k, load, rng), pause_s=rng.expovariate(1.0) if k else 0.0)
            for k in range(num_turns)
        ]
        turns[0] = replace(turns[0], spans=(system, *turns[0].spans))
        sessions.append(UserSession(number=number, due_s=next(due), turns=tuple(turns)))
    return sessions


def documents(load: GeneratedLoad, *, num_documents: int = 20, document_tokens: int = 32_768) -> list[UserSession]:
    rng = random.Random(f"{load.seed} documents")
    due = arrivals(load.rate, steady, rng)
    sessions = []
    for number in range(load.num_requests):
        document = PrefixSpan(key=(_DOCUMENT, rng.randrange(num_documents)), num_tokens=document_tokens)
        turn = _turn(_OWN, number, load, rng)
        turn = replace(turn, spans=(document, *turn.spans))
        sessions.append(UserSession(number=number, due_s=next(due), turns=(turn,)))
    return sessions


ASSISTANT_RATE = 3.4  # requests a second of Mooncake's conversation trace
SYSTEM_TOKENS = 880  # the trace's shortest prompt has 891
MORE_TURNS = 2.6
MAX_TALK = 124_000  # tokens of a conversation: the trace's longest prompt has 126,195
Quantiles = tuple[tuple[float, float], ...]
"""(share of all, value): between two points the value grows by the same factor for equal shares. The points are the
trace's (`python -m benchmarks.routing.workload_shape`)."""
_FIRST: Quantiles = (
    (0.0, 10), (0.1, 25), (0.25, 440), (0.5, 4350), (0.75, 12_100), (0.9, 24_600), (0.99, 89_000), (1.0, 121_000)
)  # fmt: skip
_ADDED: Quantiles = ((0.0, 4), (0.25, 9), (0.5, 26), (0.75, 371), (0.9, 4250), (0.99, 16_700), (1.0, 91_000))
_ANSWER: Quantiles = ((0.0, 1), (0.1, 24), (0.25, 156), (0.5, 350), (0.75, 472), (0.9, 597), (0.99, 1120), (1.0, 2000))
_PAUSE_S: Quantiles = ((0.0, 6), (0.1, 42), (0.25, 66), (0.5, 123), (0.75, 267), (0.9, 474), (0.99, 1458), (1.0, 3030))


def assistant(load: GeneratedLoad) -> list[UserSession]:
    """One product's assistant: every prompt begins with the same system prompt, and two in five conversations continue.

    Lengths, turns and pauses are distributed as in Mooncake's conversation trace, whose rate is `ASSISTANT_RATE`;
    another rate scales all times. The load is in a steady state: conversations that began before the run have their
    earlier turns in their first prompt. After turn k a conversation continues with the probability k / (k + MORE_TURNS
    - 1), as in a Yule-Simon distribution (Simon, "On a class of skew distribution functions", 1955).
    """
    rng = random.Random(f"{load.seed} assistant")
    speed, turns_each = load.rate / ASSISTANT_RATE, MORE_TURNS / (MORE_TURNS - 1)
    earliest_s = -_PAUSE_S[-1][1] / speed
    talks: list[Sequence[tuple[float, SessionTurn]]] = []
    ahead: list[float] = []  # times of turns after a conversation's first
    num_due = 0
    for after_s in arrivals(load.rate / turns_each, steady, rng):
        begin_s = earliest_s + after_s
        while ahead and ahead[0] <= begin_s:
            last_s = heapq.heappop(ahead)
            num_due += 1
            if num_due == load.num_requests:
                return _sent_until(talks, last_s)
        talk = _talk(len(talks), begin_s, speed, rng)
        talks.append(talk)
        for at_s, _ in talk:
            if at_s >= 0:
                heapq.heappush(ahead, at_s)
    raise AssertionError("arrivals do not end")


def _talk(number: int, begin_s: float, speed: float, rng: random.Random) -> list[tuple[float, SessionTurn]]:
    own = PrefixSpan(key=(_OWN, number * 1000), num_tokens=_tokens(_FIRST, rng))
    turn = SessionTurn(
        spans=(PrefixSpan(key=(_SYSTEM, 0), num_tokens=SYSTEM_TOKENS), own), num_output=_tokens(_ANSWER, rng)
    )
    talk, at_s, num_tokens = [(begin_s, turn)], begin_s, turn.num_added + turn.num_output
    while len(talk) < 1000 and rng.random() * (len(talk) + MORE_TURNS) < len(talk):
        pause_s = _quantile(_PAUSE_S, rng.random()) / speed
        span = PrefixSpan(key=(_OWN, number * 1000 + len(talk)), num_tokens=_tokens(_ADDED, rng))
        turn = SessionTurn(spans=(span,), num_output=_tokens(_ANSWER, rng), pause_s=pause_s)
        num_tokens += turn.num_added + turn.num_output
        if num_tokens > MAX_TALK:
            break
        at_s += pause_s
        talk.append((at_s, turn))
    return talk


def _sent_until(talks: Sequence[Sequence[tuple[float, SessionTurn]]], last_s: float) -> list[UserSession]:
    """Returns the turns from time 0 to `last_s`. Earlier turns become the beginning of a first prompt."""
    sessions = []
    for number, talk in enumerate(talks):
        turns = [(at_s, turn) for at_s, turn in talk if 0 <= at_s <= last_s]
        if not turns:
            continue
        before = [
            span
            for place, (at_s, turn) in enumerate(talk)
            if at_s < 0
            for span in (*turn.spans, PrefixSpan(key=(_ANSWERED, number * 1000 + place), num_tokens=turn.num_output))
        ]
        due_s, first = turns[0]
        first = replace(first, spans=(*before, *first.spans), pause_s=0.0)
        sessions.append(UserSession(number=number, due_s=due_s, turns=(first, *(turn for _, turn in turns[1:]))))
    return sessions


def _tokens(quantiles: Quantiles, rng: random.Random) -> int:
    return round(_quantile(quantiles, rng.random()))


def _quantile(quantiles: Quantiles, share: float) -> float:
    (below, low), (above, high) = next(pair for pair in pairwise(quantiles) if share <= pair[1][0])
    return float(low * (high / low) ** ((share - below) / (above - below)))


# Whole conversations: as many requests as requested, or a few more.
GENERATED: dict[str, Callable[[GeneratedLoad], list[UserSession]]] = {
    "poisson": lambda load: independent(load, steady),
    "bursts": lambda load: independent(load, bursty),
    "diurnal": lambda load: independent(load, diurnal),
    "conversations": conversations,
    "agents": agents,
    "documents": documents,
    "assistant": assistant,
}
OF_CONSTANT_RATE = frozenset({"poisson", "conversations", "agents", "documents"})
PERIODS_S = {"bursts": 60.0, "diurnal": 600.0}
LEAST_PERIODS = 3
"""A load whose rate varies warms up for one period, and two are compared."""
USUAL_REQUESTS = 1000


def least_requests(name: str, rate: float) -> int:
    return max(USUAL_REQUESTS, math.ceil(LEAST_PERIODS * PERIODS_S.get(name, 0.0) * min(rate, MAX_SPAN_S)))


def generated(name: str, load: GeneratedLoad) -> list[UserSession]:
    """Makes exactly `load.num_requests`: the last conversation may be cut short. Raises Misconfigured."""
    if name not in GENERATED:
        raise Misconfigured(f"workload.name = {name!r}: choose one of {', '.join(GENERATED)}", param="workload.name")
    sessions = GENERATED[name](load)
    num_more = sum(len(session.turns) for session in sessions) - load.num_requests
    last = sessions[-1]
    return [*sessions[:-1], replace(last, turns=last.turns[: len(last.turns) - num_more])]


def generated_at_rate(name: str, load: GeneratedLoad) -> list[UserSession]:
    """Stretches arrivals of a constant rate to exactly that rate: 1,000 random ones are off by 3 % on average."""
    sessions = generated(name, load)
    if name not in OF_CONSTANT_RATE:
        return sessions
    stretch = load.num_requests / load.rate / sessions[-1].due_s
    return [replace(session, due_s=session.due_s * stretch) for session in sessions]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimit:
    """The tokens of a session that a worker can hold. `limit` names the settings that bound it."""

    num_tokens: int
    limit: str

    def left_out(self, sessions: Sequence[UserSession]) -> str:
        longest = max(session.num_tokens for session in sessions)
        return (
            f"{counted(len(sessions), 'session')} left out: longer (up to {longest:,} tokens) than the "
            f"{self.num_tokens:,} that a worker holds ({self.limit})"
        )


def fitting(sessions: Sequence[UserSession], room: SessionLimit) -> tuple[list[UserSession], list[UserSession]]:
    """Returns the sessions that fit, and the others. Raises Misconfigured if none fits."""
    fits = [session for session in sessions if session.num_tokens <= room.num_tokens]
    if not fits:
        shortest = min(session.num_tokens for session in sessions)
        raise Misconfigured(
            f"every session is longer (the shortest: {shortest:,} tokens, prompts and answers) than the "
            f"{room.num_tokens:,} tokens that a worker holds ({room.limit}): lower workload.input_len, "
            "output_len or trace_scale, or raise the limit",
            param="workload.input_len",
        )
    return fits, [session for session in sessions if session.num_tokens > room.num_tokens]


def _turn(kind: int, number: int, load: GeneratedLoad, rng: random.Random) -> SessionTurn:
    span = PrefixSpan(key=(kind, number), num_tokens=load.prompts.draw(rng))
    return SessionTurn(spans=(span,), num_output=load.outputs.draw(rng))


def _part(lengths: Lengths, share: int) -> Lengths:
    return Lengths(low=max(1, lengths.low // share), high=max(1, lengths.high // share))
