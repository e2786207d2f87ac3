"""What a worker will take, learned from what it took: seconds to a first token, between tokens, and until KV is there.

    measured by the worker (its load) ─┐
    observed of all its pool ── Fit ───┴─▶ Line ── observed of it: Pace ──▶ Expectation ──▶ Candidate ──▶ policies
                                                        └─▶ errors ──▶ `baton_prediction_*`

What is known of one worker alone is its standing, a column of numbers that changes with its load and with what is
observed of it; pools' fits change with every request. Both together, for all workers at once, are what is expected.

What was observed lately counts: half after `HALF_LIFE_S`, or `HALF_COUNT` newer observations. One that is far off is
drawn near before it counts, so that a stall is no lesson and a change of pace is one soon. Pure: time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protos.values import WorkerLoad, WorkerRole
from router.latency.prefill_speeds import Speeds, counted, slowness
from router.latency.recent_work import Recent, since_whole, whole
from router.latency.ttft_overhead import Overhead
from router.latency.worker_features import Numbers, Standing, where
from router.policies.base import Line
from router.policies.table import LINES, Floats, Lines, Places, Ways

HALF_LIFE_S = 300.0
HALF_COUNT = 32
TRUST = 2.0  # observations that outweigh what was believed before them
SURE = 8.0  # observations after which an outlier is known as one, and a pool well enough to tell its workers apart
DOUBT = 1.5  # errors of its mean by which a worker must differ from its pool to be believed to
OUTLIER = 4.0  # mean errors off the line
FAR = 10.0  # times as long as believed: the most that one of the first observations says

# Of a cluster that nothing is known of: neither a laptop nor the largest card, and wrong for a few requests only.
READING = Line(fixed_s=0.005, each_s=1e-4)
STEPPING = Line(fixed_s=0.02, each_s=1e-4)
RECEIVING = Line(fixed_s=0.0, each_s=1e-9)
LOADING = Line(fixed_s=0.0, each_s=1e-10)  # from host memory: of a worker that has loaded nothing yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Of one worker, as `Candidate` has it; but `loading` is by bytes."""

    reading: Line = READING
    loading: Line = LOADING
    stepping: Line = STEPPING
    receiving: Line = RECEIVING
    recent_tokens: float = 0.0


_ROLES = tuple(WorkerRole)
_COLOCATED = _ROLES.index(WorkerRole.COLOCATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """Of many workers, as columns."""

    reading: Lines
    loading: Lines
    stepping: Lines
    receiving: Lines
    recent_tokens: Floats

    def of(self, place: int) -> Expectation:
        lines = {name: getattr(self, name) for name in LINES}
        each = {
            name: Line(fixed_s=float(many.fixed_s[place]), each_s=float(many.each_s[place]))
            for name, many in lines.items()
        }
        return Expectation(**each, recent_tokens=float(self.recent_tokens[place]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far predictions have been off lately, in seconds: on average, and after early and late have cancelled."""

    num_observed: int = 0
    mean_s: float = 0.0
    bias_s: float = 0.0


class Judge:
    """Keeps the errors of one prediction, and knows an outlier by them."""

    def __init__(self) -> None:
        self.so_far = Errors()

    def heard(self, seconds: float, expected: float, *, sure: bool) -> float:
        """What is to be learned of an observation: the time itself, or the nearest that is no outlier."""
        before, error = self.so_far, seconds - expected
        share = max(1 / (before.num_observed + 1), 1 - 0.5 ** (1 / HALF_COUNT))
        size = min(abs(error), 2 * OUTLIER * before.mean_s) if sure else abs(error)
        after = self.so_far = Errors(
            num_observed=before.num_observed + 1,
            mean_s=before.mean_s + share * (size - before.mean_s),
            bias_s=before.bias_s + share * (error - before.bias_s),
        )
        bound = OUTLIER * after.mean_s
        return expected + min(max(error, -bound), bound) if sure else seconds


class Fit:
    """seconds = fixed + each x amount, from observations of both. The prior counts like `TRUST` observations."""

    def __init__(self) -> None:
        self.errors = Judge()
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._observed_s = 0.0
        self._known: tuple[Line, Line] | None = None  # what `line` last said, and to which prior

    def observe(self, amount: float, seconds: float, *, prior: Line, now: float) -> None:
        """What was expected, and counts as predicted, is what `line(prior)` says before this."""
        self._age(now)
        expected = self.line(prior)(amount)
        seconds = self.errors.heard(seconds, expected, sure=self.sure)
        if prior.fixed_s and not self.sure:
            seconds = min(seconds, FAR * expected)  # memory is touched and code is loaded by the first
        self._weight += 1
        self._x += amount
        self._y += seconds
        self._xx += amount * amount
        self._xy += amount * seconds
        self._known = None

    @property
    def known(self) -> bool:
        """Has anything been observed?"""
        return self._weight > 0

    @property
    def sure(self) -> bool:
        """Has so much been observed lately that what is far off is an exception?"""
        return self._weight >= SURE

    def line(self, prior: Line) -> Line:
        """Neither part is negative. The prior's observations are of amounts as seen so far."""
        if not self._weight:
            return prior
        if self._known is None or self._known[0] != prior:
            self._known = (prior, self._fitted(prior))
        return self._known[1]

    def _fitted(self, prior: Line) -> Line:
        amount = self._x / self._weight or 1.0
        half = TRUST / 2  # at nothing, and at twice the mean
        weight, x, xx = self._weight + 2 * half, self._x + half * 2 * amount, self._xx + half * (2 * amount) ** 2
        y = self._y + half * (prior(0) + prior(2 * amount))
        xy = self._xy + half * 2 * amount * prior(2 * amount)
        spread = weight * xx - x * x
        each = (weight * xy - x * y) / spread if spread > 0 else 0.0
        fixed = (y - each * x) / weight
        if each < 0:  # amounts have told nothing: as was believed of them, as many times longer as all took
            ratio = y / (weight * prior(x / weight)) if prior(x / weight) > 0 else 0.0
            return Line(fixed_s=prior.fixed_s * ratio, each_s=prior.each_s * ratio)
        if fixed < 0:
            return Line(each_s=xy / xx)
        return Line(fixed_s=fixed, each_s=each)

    def _age(self, now: float) -> None:
        keep = _share_kept(now - self._observed_s)
        self._observed_s = now
        self._weight *= keep
        self._x *= keep
        self._y *= keep
        self._xx *= keep
        self._xy *= keep


class Pace:
    """How many times longer one worker takes than `line` says, lately. One number is learned from few observations, and
    none is believed that could be chance: then all that is cheap would go to one worker of several of one kind, and a
    conversation would leave the prefix it has."""

    def __init__(self) -> None:
        self.errors = Judge()
        self._weight = self._took_s = self._expected_s = self._off_s = 0.0
        self._each_s = self._slower = 0.0  # the part of what was expected that its word counts in; those words' sum
        self._told = 1.0
        self._observed_s = 0.0

    def tell(self, slower: float) -> None:
        """The worker's word on its speed, of which lines count what is a difference. What it took under another word is
        taken as it would be now where they count this one differently, or they would count what was learned again."""
        share = counted(slower) / counted(self._told)
        self._told = slower
        if share != 1.0 and self._weight:
            since = slower * self._weight / self._slower
            self._took_s *= since
            self._off_s *= since
            self._expected_s += (share - 1) * self._each_s
            self._each_s *= share
            self._slower = slower * self._weight

    def observe(self, amount: float, seconds: float, *, line: Line, now: float, learn: bool = True) -> None:
        """What was expected, and counts as predicted, is what `of(line)` says before this. Nothing is learned from it
        about the worker while its pool's line is still off itself."""
        if not learn:
            self.errors.heard(seconds, self.of(line)(amount), sure=False)
            return
        keep = _share_kept(now - self._observed_s)
        self._observed_s = now
        self._weight *= keep
        self._took_s *= keep
        self._expected_s *= keep
        self._off_s *= keep
        self._each_s *= keep
        self._slower *= keep
        seconds = self.errors.heard(seconds, self.of(line)(amount), sure=self._weight >= SURE)
        self._weight += 1
        self._took_s += seconds
        self._expected_s += line(amount)
        self._each_s += line.each_s * amount
        self._slower += self._told
        self._off_s += abs(seconds - self._mean * line(amount))

    def of(self, line: Line) -> Line:
        ratio = self.ratio
        return Line(fixed_s=line.fixed_s * ratio, each_s=line.each_s * ratio)

    @property
    def ratio(self) -> float:
        """1 while nothing has been observed, or what was may as well be chance."""
        if not self._expected_s:
            return 1.0
        above, error = self._mean - 1, self._off_s / self._expected_s / math.sqrt(self._weight)
        if abs(above) <= DOUBT * error:
            return 1.0
        return 1 + above * (1 - (DOUBT * error / above) ** 2)  # Breiman's garrote: what is certain is kept whole

    @property
    def _mean(self) -> float:
        believed_s = TRUST * self._expected_s / self._weight
        return max(0.0, self._took_s + believed_s) / (self._expected_s + believed_s)


class Predictor:
    """The fits of all workers and lanes. A worker that nobody has measured counts as its pool does."""

    def __init__(self) -> None:
        self._reading: dict[str, Pace] = {}
        self._stepping: dict[str, Pace] = {}
        self._receiving: dict[str, Fit] = {}
        self._pools: dict[WorkerRole, tuple[Fit, Fit]] = {role: (Fit(), Fit()) for role in WorkerRole}
        self._overheads = {role: Overhead() for role in WorkerRole}
        self._all_lanes = Fit()
        self._offered: tuple[Sequence[str], dict[str, int], _Priors] = ((), {}, ())
        self._priors: dict[str, tuple[float, ...]] = {}  # of workers that are not among those offered last
        self._fits_of_lanes: dict[str, dict[str, Fit]] = {}
        self._lanes: dict[str, Ways] = {}
        self._recent = {role: Recent() for role in WorkerRole}
        self._speeds = {role: Speeds() for role in WorkerRole}
        self._changed: dict[str, None] = {}
        self.answer_tokens = 64.0

    # -- what is expected ----------------------------------------------------------------------------------------------

    def standing(self, worker_id: str, role: WorkerRole, load: WorkerLoad, *, now: float) -> Standing[float]:
        """It stays as it is while its load does and `changed` does not name it."""
        colocated = role is WorkerRole.COLOCATED
        self._speeds[role].tell(worker_id, load.prefill_tokens_per_s)
        self._overheads[role].met(worker_id)
        reading, stepping = self._reading.get(worker_id), None if colocated else self._stepping.get(worker_id)
        if reading is not None:
            reading.tell(self._speeds[role].slower(worker_id))
        lane = Line(each_s=load.transfer_s / load.transfer_bytes) if load.transfer_bytes else None
        receiving = self._receiving.get(worker_id)
        fitted = receiving.line(lane) if receiving is not None and lane is not None else lane
        loading = _load_line(load)
        return Standing(
            _ROLES.index(role),
            load.num_running,
            self._speeds[role].of(worker_id),
            load.decode_step_s,
            lane.each_s if lane is not None else np.nan,
            loading.fixed_s,
            loading.each_s,
            reading.ratio if reading is not None else 1.0,
            stepping.ratio if stepping is not None else 1.0,
            receiving is not None and lane is None,
            fitted.fixed_s if fitted is not None else np.nan,
            fitted.each_s if fitted is not None else np.nan,
            *whole(*self._recent[role].of(worker_id, now=now)),
        )

    def changed(self) -> Sequence[str]:
        """Workers of which something was observed since this was last asked, or whose speed has come to count
        otherwise, for others have told theirs."""
        crossed = [worker_id for speeds in self._speeds.values() for worker_id in speeds.crossed()]
        changed, self._changed = tuple(dict.fromkeys((*self._changed, *crossed))), {}
        return changed

    def expectations(self, worker_ids: Sequence[str], standings: Floats, *, now: float) -> Expectations:
        """Of workers with these `standings`, a row for each number of a `Standing`. They count as offered from now on:
        what is observed of them is held against this."""
        standing: Standing[Floats] = Standing(*standings)
        pools = standing.role.astype(np.intp)
        found = self._expected(
            standing,
            _columns([self._pools[one][0].line(READING) for one in _ROLES], pools),
            _columns([self._pools[one][1].line(STEPPING) for one in _ROLES], pools),
            np.array([self._speeds[one].mean for one in _ROLES])[pools],
            np.array([float(self._pools[one][1].known) for one in _ROLES])[pools],
        )
        priors, reading, stepping, receiving = found
        self._offer(worker_ids, np.array(priors).T)
        lane = self._all_lanes.line(RECEIVING)
        for place in np.flatnonzero(standing.awaits_fit).tolist():
            fitted = self._receiving[worker_ids[place]].line(lane)
            receiving[0][place], receiving[1][place] = fitted.fixed_s, fitted.each_s
        shares, wholes = np.array([since_whole(self._recent[one].clock(now)) for one in _ROLES]).T
        left = np.ldexp(shares[pools], (standing.recent_at - wholes[pools]).astype(np.intc))
        return Expectations(
            reading=Lines(*reading),
            loading=Lines(standing.load_fixed_s, standing.load_each_s),
            stepping=Lines(*stepping),
            receiving=Lines(*receiving),
            recent_tokens=standing.recent_tokens * left,
        )

    def expected_of_few(
        self, worker_ids: Sequence[str], standings: Sequence[Standing[float]], *, now: float
    ) -> list[tuple[float, ...]]:
        """The same of few workers, by turns: for each `recent_tokens`, then both numbers of its lines, in the order of
        a candidate's."""
        told, priors = list[tuple[float, ...]](), list[Sequence[float]]()
        lane = self._all_lanes.line(RECEIVING)
        for worker_id, standing in zip(worker_ids, standings, strict=True):
            role = _ROLES[int(standing.role)]
            reads, writes = self._pools[role]
            read, step = reads.line(READING), writes.line(STEPPING)
            lines, known = ((read.fixed_s, read.each_s), (step.fixed_s, step.each_s)), float(writes.known)
            found = self._expected(standing, *lines, self._speeds[role].mean, known)
            prior, reading, stepping, receiving = found
            if standing.awaits_fit:
                fitted = self._receiving[worker_id].line(lane)
                receiving = fitted.fixed_s, fitted.each_s
            loading = standing.load_fixed_s, standing.load_each_s
            share, last = since_whole(self._recent[role].clock(now))
            recent = standing.recent_tokens * math.ldexp(share, int(standing.recent_at) - last)
            told.append((recent, *reading, *loading, *stepping, *receiving))
            priors.append(prior)
        self._offer(worker_ids, priors)
        return told

    def _expected(
        self,
        standing: Standing[Numbers],
        read: tuple[Numbers, Numbers],
        step: tuple[Numbers, Numbers],
        speed: Numbers,
        known: Numbers,
    ) -> tuple[Sequence[Numbers], tuple[Numbers, Numbers], tuple[Numbers, Numbers], tuple[Numbers, Numbers]]:
        """The priors, and the lines of reading, stepping and receiving: of one worker as numbers, or of many as arrays
        of them, to the same bits. `read` and `step` are the lines of its pool; is the latter `known` (0: no)? `speed`
        is what its workers have told on average, 0 if none has."""
        running, step_s, lane_s = standing.num_running, standing.step_s, standing.lane_s
        reading_ratio, stepping_ratio = standing.reading_ratio, standing.stepping_ratio
        (step_fixed_s, step_each_s), lane = step, self._all_lanes.line(RECEIVING)
        slower = slowness(standing.read_speed, speed)
        read_each_s = where(speed > 0, slower / where(speed > 0, speed, 1.0), read[1])
        # What an idle worker took long ago must not keep it idle for ever.
        as_pool = ((running == 0) & (known != 0)) | (step_s == 0)
        own_step_s = step_s - step_each_s * running
        own_fixed_s = where(own_step_s > 0.0, own_step_s, 0.0)
        steps: tuple[Numbers, Numbers] = (where(as_pool, step_fixed_s, own_fixed_s), step_each_s)
        colocated = standing.role == _COLOCATED
        if np.any(colocated) if isinstance(colocated, np.ndarray) else colocated:
            # Steps in which prompts are read are long for as long as there are prompts, and whoever writes there meets
            # its neighbours' wherever it goes: what one worker's steps took tells where prompts went, not where to send
            # the next one. So of colocated workers the pool's line counts, by how fast each reads.
            steps = (
                where(colocated, step_fixed_s * slower, steps[0]),
                where(colocated, step_each_s * slower, steps[1]),
            )
        own_lane = lane_s == lane_s
        prior_fixed_s, prior_each_s = where(own_lane, 0.0, lane.fixed_s), where(own_lane, lane_s, lane.each_s)
        fixed_s = where(own_lane, standing.fitted_fixed_s, lane.fixed_s)
        each_s = where(own_lane, standing.fitted_each_s, lane.each_s)
        return (
            (read[0], read_each_s, steps[0], steps[1], prior_fixed_s, prior_each_s),
            (read[0] * reading_ratio, read_each_s * reading_ratio),
            (steps[0] * stepping_ratio, steps[1] * stepping_ratio),
            (fixed_s, each_s),
        )

    def expect(self, worker_id: str, role: WorkerRole, load: WorkerLoad, *, now: float) -> Expectation:
        """Of one worker."""
        standing = self.standing(worker_id, role, load, now=now)
        [(recent, *lines)] = self.expected_of_few((worker_id,), [standing], now=now)
        each = [Line(fixed_s=lines[at], each_s=lines[at + 1]) for at in range(0, len(lines), 2)]
        return Expectation(**dict(zip(LINES, each, strict=True)), recent_tokens=recent)

    def overhead_s(self, role: WorkerRole, *, now: float) -> float:
        """What no first token of such workers has come without lately, though they were idle, besides the reading; 0
        while it is unknown."""
        return self._overheads[role].at(now)

    @property
    def lanes(self) -> Mapping[str, Ways]:
        """By reader and writer, of those measured. It goes on changing."""
        return self._lanes

    def errors(self) -> Mapping[str, tuple[Errors, Errors]]:
        """By worker: of first tokens, and of the time between tokens."""
        return {
            worker_id: (
                self._reading[worker_id].errors.so_far if worker_id in self._reading else Errors(),
                self._stepping[worker_id].errors.so_far if worker_id in self._stepping else Errors(),
            )
            for worker_id in self._reading.keys() | self._stepping.keys()
        }

    def routed(self, worker_id: str, role: WorkerRole, num_tokens: int, *, beside: int, now: float) -> None:
        """A worker was given a request of which it reads so many tokens, beside so many that are there."""
        self._recent[role].give(worker_id, num_tokens + self._slowed_tokens(role, beside), now=now)
        self._changed[worker_id] = None

    # -- what was observed: of a worker that has left, its pool learns and nothing else is kept ------------------------

    def saw_first_token(
        self, worker_id: str, role: WorkerRole, *, num_tokens: float, seconds: float, now: float, on_idle: bool = False
    ) -> None:
        """A first token came so long after its decision; until then the worker had so many tokens to read. `on_idle`:
        it had no other request when it was given this one."""
        pool = self._pools[role][0]
        if (prior := self._prior(worker_id)) is not None:
            pace = self._reading.setdefault(worker_id, Pace())
            pace.observe(num_tokens, seconds, line=prior.reading, now=now, learn=pool.sure)
            self._changed[worker_id] = None
        pool.observe(num_tokens, seconds, prior=READING, now=now)
        if on_idle:  # others' steps are no part of what comes to everybody
            pooled_s = pool.line(READING).each_s
            each_s = pooled_s if prior is None else max(prior.reading.each_s, pooled_s)
            self._overheads[role].observe(seconds, reading_s=num_tokens * each_s, now=now)

    def saw_answer(
        self, worker_id: str, role: WorkerRole, *, num_sequences: float, num_tokens: int, seconds: float, now: float
    ) -> None:
        """The tokens of an answer, written among so many sequences, were so many seconds apart."""
        pool = self._pools[role][1]
        if (prior := self._prior(worker_id)) is not None:
            pace = self._stepping.setdefault(worker_id, Pace())
            pace.observe(num_sequences, seconds, line=prior.stepping, now=now, learn=pool.sure)
            self._changed[worker_id] = None
        pool.observe(num_sequences, seconds, prior=STEPPING, now=now)
        self.answer_tokens += (num_tokens - self.answer_tokens) / HALF_COUNT

    def saw_transfer(self, reader: str, writer: str, *, num_bytes: float, seconds: float, now: float) -> None:
        """An answer was held up by so much, for KV of so many bytes."""
        if self._prior(reader) is not None and (known := self._prior(writer)) is not None:
            prior = known.receiving
            lane = self._fits_of_lanes.setdefault(reader, {}).setdefault(writer, Fit())
            lane.observe(num_bytes, seconds, prior=prior, now=now)
            self._lanes.setdefault(reader, Ways()).set(writer, lane.line(prior))
            self._receiving.setdefault(writer, Fit()).observe(num_bytes, seconds, prior=prior, now=now)
            self._changed[writer] = None
        self._all_lanes.observe(num_bytes, seconds, prior=RECEIVING, now=now)

    def forget(self, worker_id: str) -> None:
        """A worker has left, with its lanes."""
        self._reading.pop(worker_id, None)
        self._stepping.pop(worker_id, None)
        self._receiving.pop(worker_id, None)
        self._priors.pop(worker_id, None)
        self._offered[1].pop(worker_id, None)
        self._changed.pop(worker_id, None)
        for role in WorkerRole:
            self._recent[role].forget(worker_id)
            self._speeds[role].forget(worker_id)
            self._overheads[role].left(worker_id)
        for known in (self._fits_of_lanes, self._lanes):
            known.pop(worker_id, None)
        for reader in [reader for reader, fits in self._fits_of_lanes.items() if fits.pop(worker_id, None)]:
            self._lanes[reader].forget(worker_id)
            if not self._lanes[reader]:
                del self._lanes[reader], self._fits_of_lanes[reader]

    # ------------------------------------------------------------------------------------------------------------------

    def _slowed_tokens(self, role: WorkerRole, beside: int) -> float:
        """How many tokens could be read in the time that one more answer costs those beside it. Who reads and writes
        may be busy with prompts that it has cached; what a lone conversation finds on an idle worker costs nobody."""
        reading, stepping = self._pools[role]
        each_s = reading.line(READING).each_s
        if role is not WorkerRole.COLOCATED or not each_s:
            return 0.0
        return self.answer_tokens * stepping.line(STEPPING).each_s * beside / each_s

    def _offer(self, worker_ids: Sequence[str], priors: _Priors) -> None:
        before, places, old = self._offered
        if worker_ids is before:
            self._offered = (before, places, priors)
            return
        self._priors.update((worker_id, tuple(map(float, old[place]))) for worker_id, place in places.items())
        self._offered = (worker_ids, {worker_id: place for place, worker_id in enumerate(worker_ids)}, priors)

    def _prior(self, worker_id: str) -> _Prior | None:
        """What was expected of a worker when it was last offered, without what its jobs taught; None if it never was,
        or has left."""
        _, places, priors = self._offered
        place = places.get(worker_id)
        values = tuple(map(float, priors[place])) if place is not None else self._priors.get(worker_id)
        return _Prior(*[Line(fixed_s=values[i], each_s=values[i + 1]) for i in range(0, 6, 2)]) if values else None


_Priors = NDArray[np.float64] | Sequence[Sequence[float]]
"""Of each worker, the numbers of a `_Prior`."""


class _Prior(NamedTuple):
    reading: Line
    stepping: Line
    receiving: Line


def _columns(lines: Sequence[Line], pools: Places) -> tuple[Floats, Floats]:
    """For each worker its pool's line."""
    return np.array([line.fixed_s for line in lines])[pools], np.array([line.each_s for line in lines])[pools]


def _load_line(load: WorkerLoad) -> Line:
    """As the worker measures its copies."""
    host = load.host
    return Line(each_s=host.load_s / host.loaded_bytes) if host is not None and host.loaded_bytes else LOADING


def _share_kept(age_s: float) -> float:
    return float(0.5 ** (1 / HALF_COUNT + max(0.0, age_s) / HALF_LIFE_S))
