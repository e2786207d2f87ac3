"""What a worker will take, learned from what it took: seconds to a first token, between tokens, and until KV is there.

    measured by the worker (its load) ─┐
    observed of all its pool ── Fit ───┴─▶ Line ── observed of it: Pace ──▶ Expectation ──▶ Candidate ──▶ policies
                                                        └─▶ errors ──▶ `baton_prediction_*`

What was observed lately counts: half after `HALF_LIFE_S`, or `HALF_COUNT` newer observations. One that is far off is
drawn near before it counts, so that a stall is no lesson and a change of pace is one soon. Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protos.values import WorkerLoad, WorkerRole
from router.policies.base import Line

HALF_LIFE_S = 300.0
HALF_COUNT = 32
RECENT_S = 300.0  # after which work sent to a worker counts half
TRUST = 2.0  # observations that outweigh what was believed before them
SURE = 8.0  # observations after which an outlier is known as one
OUTLIER = 4.0  # mean errors off the line

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
        seconds = self.errors.heard(seconds, self.line(prior)(amount), sure=self._weight >= SURE)
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
        if each < 0:
            return Line(fixed_s=y / weight)
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
    """How many times longer one worker takes than `line` says, lately. One number is learned from few observations, so
    that workers of one kind do not seem different by chance: then all that is cheap would go to one of them."""

    def __init__(self) -> None:
        self.errors = Judge()
        self._weight = self._took_s = self._expected_s = 0.0
        self._observed_s = 0.0

    def observe(self, amount: float, seconds: float, *, line: Line, now: float) -> None:
        """What was expected, and counts as predicted, is what `of(line)` says before this."""
        keep = _share_kept(now - self._observed_s)
        self._observed_s = now
        self._weight, self._took_s, self._expected_s = (
            self._weight * keep, self._took_s * keep, self._expected_s * keep,
        )  # fmt: skip
        seconds = self.errors.heard(seconds, self.of(line)(amount), sure=self._weight >= SURE)
        self._weight += 1
        self._took_s += seconds
        self._expected_s += line(amount)

    def of(self, line: Line) -> Line:
        if not self._expected_s:
            return line
        believed_s = TRUST * self._expected_s / self._weight
        ratio = max(0.0, self._took_s + believed_s) / (self._expected_s + believed_s)
        return Line(fixed_s=line.fixed_s * ratio, each_s=line.each_s * ratio)


class Predictor:
    """The fits of all workers and lanes. A worker that nobody has measured counts as its pool does."""

    def __init__(self) -> None:
        self._reading: dict[str, Pace] = {}
        self._stepping: dict[str, Pace] = {}
        self._receiving: dict[str, Fit] = {}
        self._pools: dict[WorkerRole, tuple[Fit, Fit]] = {role: (Fit(), Fit()) for role in WorkerRole}
        self._all_lanes = Fit()
        self._priors: dict[str, Expectation] = {}  # of candidates when they last were, without what their jobs taught
        self._fits_of_lanes: dict[tuple[str, str], Fit] = {}
        self._lanes: dict[tuple[str, str], Line] = {}
        self._recent: dict[WorkerRole, dict[str, tuple[float, float]]] = {role: {} for role in WorkerRole}
        self._speeds: dict[str, float] = {}  # tokens a second that colocated workers read
        self.answer_tokens = 64.0

    # -- what is expected ----------------------------------------------------------------------------------------------

    def expect(self, worker_id: str, role: WorkerRole, load: WorkerLoad, *, now: float) -> Expectation:
        prior = self._priors[worker_id] = Expectation(
            reading=self._read_prior(role, load),
            loading=_load_line(load),
            stepping=self._mixed(worker_id, load) if role is WorkerRole.COLOCATED else self._step_prior(role, load),
            receiving=self._lane_prior(load),
            recent_tokens=self._recent_tokens(worker_id, role, now),
        )
        reading = self._reading.get(worker_id)
        stepping = None if role is WorkerRole.COLOCATED else self._stepping.get(worker_id)
        receiving = self._receiving.get(worker_id)
        return Expectation(
            reading=reading.of(prior.reading) if reading else prior.reading,
            loading=prior.loading,
            stepping=stepping.of(prior.stepping) if stepping else prior.stepping,
            receiving=receiving.line(prior.receiving) if receiving else prior.receiving,
            recent_tokens=prior.recent_tokens,
        )

    @property
    def lanes(self) -> Mapping[tuple[str, str], Line]:
        """By (reader, writer), of those measured. It goes on changing."""
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

    def routed(self, worker_id: str, role: WorkerRole, num_tokens: int, *, now: float) -> None:
        """A worker was given so many tokens to read."""
        self._recent[role][worker_id] = (self._recent_tokens(worker_id, role, now) + num_tokens, now)

    # -- what was observed: of a worker that has left, its pool learns and nothing else is kept ------------------------

    def saw_first_token(
        self, worker_id: str, role: WorkerRole, *, num_tokens: float, seconds: float, now: float
    ) -> None:
        """A first token came so long after its decision; until then the worker had so many tokens to read."""
        if worker_id in self._priors:
            pace = self._reading.setdefault(worker_id, Pace())
            pace.observe(num_tokens, seconds, line=self._priors[worker_id].reading, now=now)
        self._pools[role][0].observe(num_tokens, seconds, prior=READING, now=now)

    def saw_answer(
        self, worker_id: str, role: WorkerRole, *, num_sequences: float, num_tokens: int, seconds: float, now: float
    ) -> None:
        """The tokens of an answer, written among so many sequences, were so many seconds apart."""
        if worker_id in self._priors:
            pace = self._stepping.setdefault(worker_id, Pace())
            pace.observe(num_sequences, seconds, line=self._priors[worker_id].stepping, now=now)
        self._pools[role][1].observe(num_sequences, seconds, prior=STEPPING, now=now)
        self.answer_tokens += (num_tokens - self.answer_tokens) / HALF_COUNT

    def saw_transfer(self, reader: str, writer: str, *, num_bytes: float, seconds: float, now: float) -> None:
        """An answer was held up by so much, for KV of so many bytes."""
        if reader in self._priors and writer in self._priors:
            prior = self._priors[writer].receiving
            lane = self._fits_of_lanes.setdefault((reader, writer), Fit())
            lane.observe(num_bytes, seconds, prior=prior, now=now)
            self._lanes[reader, writer] = lane.line(prior)
            self._receiving.setdefault(writer, Fit()).observe(num_bytes, seconds, prior=prior, now=now)
        self._all_lanes.observe(num_bytes, seconds, prior=RECEIVING, now=now)

    def forget(self, worker_id: str) -> None:
        """A worker has left, with its lanes."""
        self._reading.pop(worker_id, None)
        self._stepping.pop(worker_id, None)
        self._receiving.pop(worker_id, None)
        self._priors.pop(worker_id, None)
        self._speeds.pop(worker_id, None)
        for recent in self._recent.values():
            recent.pop(worker_id, None)
        for lane in [lane for lane in self._fits_of_lanes if worker_id in lane]:
            del self._fits_of_lanes[lane], self._lanes[lane]

    # ------------------------------------------------------------------------------------------------------------------

    def _recent_tokens(self, worker_id: str, role: WorkerRole, now: float) -> float:
        """A newcomer counts as if it had had its pool's mean: it is not owed what others did before it came."""
        pool = self._recent[role]
        if worker_id not in pool:
            others = [num_tokens * _kept(now - since_s) for num_tokens, since_s in pool.values()]
            pool[worker_id] = (sum(others) / len(others) if others else 0.0, now)
        num_tokens, since_s = pool[worker_id]
        return num_tokens * _kept(now - since_s)

    def _read_prior(self, role: WorkerRole, load: WorkerLoad) -> Line:
        pool = self._pools[role][0].line(READING)
        if not load.prefill_tokens_per_s:
            return pool
        return Line(fixed_s=pool.fixed_s, each_s=1 / load.prefill_tokens_per_s)

    def _step_prior(self, role: WorkerRole, load: WorkerLoad) -> Line:
        pool = self._pools[role][1].line(STEPPING)
        idle = not load.num_running and self._pools[role][1].known
        if idle or not load.decode_step_s:  # what an idle worker took long ago must not keep it idle for ever
            return pool
        return Line(fixed_s=max(0.0, load.decode_step_s - pool.each_s * load.num_running), each_s=pool.each_s)

    def _mixed(self, worker_id: str, load: WorkerLoad) -> Line:
        """Between tokens where prompts are read in the same steps. These are long for as long as there are prompts, and
        whoever writes there meets its neighbours' wherever it goes: what one worker's steps took tells where prompts
        went, not where to send the next one. So the pool's line, by how fast this worker reads."""
        line = self._pools[WorkerRole.COLOCATED][1].line(STEPPING)
        if load.prefill_tokens_per_s:
            self._speeds[worker_id] = load.prefill_tokens_per_s
        own = self._speeds.get(worker_id)
        if own is None:
            return line
        slowness = sum(self._speeds.values()) / len(self._speeds) / own
        return Line(fixed_s=line.fixed_s * slowness, each_s=line.each_s * slowness)

    def _lane_prior(self, load: WorkerLoad) -> Line:
        if not load.transfer_bytes:
            return self._all_lanes.line(RECEIVING)
        return Line(each_s=load.transfer_s / load.transfer_bytes)


def _load_line(load: WorkerLoad) -> Line:
    """As the worker measures its copies."""
    host = load.host
    return Line(each_s=host.load_s / host.loaded_bytes) if host is not None and host.loaded_bytes else LOADING


def _kept(age_s: float) -> float:
    return float(0.5 ** (age_s / RECENT_S))


def _share_kept(age_s: float) -> float:
    return float(0.5 ** (1 / HALF_COUNT + max(0.0, age_s) / HALF_LIFE_S))
