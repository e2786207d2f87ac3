"""The planner's decision: `decide(observation, ...) -> FleetDecision`, pure, the same live, simulated and as advice.

observation ─▶ may it decide? ─▶ what load comes? ─▶ which fleets serve it? ─▶ the cheapest ─▶ not yet?

- Waiting, refused and failed requests count against the objective.
- Without requests the fleet goes to its least. Without a fresh observation nothing changes.
- A worker goes only if the others would serve the largest load of the last minutes, and no gateway is silent.
- A fleet that was too small is not tried again at such a load for hours.
- An ordered worker counts as there until it is given up; then it is not ordered again for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from cluster.planner.forecast import expected, learned
from cluster.planner.planner_values import (
    ActionTimes,
    FleetDecision,
    FleetLimits,
    FleetObjective,
    LoadFactors,
    Observation,
    PlannerMemory,
    PlannerPace,
    TooSmall,
)
from cluster.planner.queueing import attainment, shares_in_time
from protos.hints import counted
from protos.values import WorkerRole
from router.fleet_owner import WeighedCounts

REACH = 2
"""The workers of a role that one decision may add or remove, unless the fleet is overloaded."""
SPARE = 0.25
"""A smaller fleet must miss the objective by this share less than is allowed."""
SMALL = 0.02
"""Smaller shares are compared by two digits."""
_DRIFT, _DEVIATIONS = 0.02, 2.0
"""Measurements and predictions may differ by this share, or by so many deviations of the sample."""
_LEAST_FACTOR, _MOST_FACTOR, _FASTEST = 0.5, 4.0, 1.5
_FORGET_PATIENCES = 8.0
"""A factor that nothing contradicts halves its distance from 1 in about six times `rest_s`."""
_HALVINGS = 12
_HOLD_RESTS = 4.0
"""A fleet that was too small is not tried again for so many times `rest_s`, then twice as long each time."""
_MOST_HOLD_RESTS = 64.0
_LIGHTER = 0.15
"""A load that is lighter by this share, or by so many deviations of the sample, is another one."""
_WEIGHED = 5

Counts = Mapping[WorkerRole, int]
_FLIPPABLE = (WorkerRole.PREFILL, WorkerRole.DECODE)


def decide(
    seen: Observation | None,
    objective: FleetObjective,
    limits: FleetLimits,
    memory: PlannerMemory,
    *,
    now: float,
    desired: Counts,
    times: ActionTimes | None = None,
    pace: PlannerPace | None = None,
) -> FleetDecision:
    """Decides about the `desired` fleet; nothing without a fresh observation. `now`: seconds since 1970."""
    times, pace = times or ActionTimes(), pace or PlannerPace()
    if seen is None or now - seen.at_s > pace.stale_s:
        age = "there is none" if seen is None else f"the latest is {now - seen.at_s:.0f} s old"
        return _kept(desired, now, f"no decision without a fresh observation: {age}", memory)
    return _Planner(seen, objective, limits, memory, now, desired, times, pace).decide()


def _kept(desired: Counts, now: float, reason: str, memory: PlannerMemory) -> FleetDecision:
    return FleetDecision(at_s=now, counts=dict(desired), reason=reason, memory=memory)


class _Planner:
    def __init__(
        self, seen: Observation, objective: FleetObjective, limits: FleetLimits, memory: PlannerMemory, now: float,
        desired: Counts, times: ActionTimes, pace: PlannerPace,
    ) -> None:  # fmt: skip
        self._seen, self._objective, self._limits = seen, objective, limits
        self._now, self._times, self._pace, self._desired = now, times, pace, desired
        self._expired = self._give_up(desired)
        self._fleet = {role: count - self._expired.get(role, 0) for role, count in desired.items()}
        self._memory = self._learn(memory)
        self._load = self._offered()

    def decide(self) -> FleetDecision:
        now, memory = self._now, self._memory
        share = self._attainment(self._fleet, self._load)
        if memory.manual_until_s > now:
            left = memory.manual_until_s - now
            decision = self._keep(f"an operator's change holds for {left:.0f} s more")
            return replace(decision, counts=dict(self._desired))  # its late workers, too, are the operator's
        weighed = sorted(self._candidates(), key=self._order)
        # a fleet above its limits is no candidate: it must become one of these
        best = next((fleet for fleet in weighed if self._found_too_small(fleet.counts) is None), weighed[0])
        if dict(best.counts) == self._fleet:
            return self._keep(f"{self._state(share)}{self._why_not(weighed[0], share)}", weighed)
        if self._shrinks(best.counts) and (held := self._held_back()):
            return self._keep(held, weighed)
        if self._shrinks(best.counts):
            memory = replace(memory, shrunk_s=now)
        elif min(share, self._seen.attainment) < self._objective.attainment:
            memory = replace(memory, learned=replace(memory.learned, too_small=self._with_present_one()))
        return FleetDecision(
            at_s=now,
            counts=dict(best.counts),
            flips=_flips(self._fleet, best.counts),
            reason=f"{self._state(share)}; {_named(best.counts)} would {self._serve(best.attainment)}",
            weighed=self._shown(weighed),
            memory=memory,
        )

    # -- what is there, and what comes ---------------------------------------------------------------------------------

    def _give_up(self, desired: Counts) -> dict[WorkerRole, int]:
        latest = self._now - self._pace.expire_starts * self._times.start_s
        late = {
            role: sum(since < latest for since in pool.pending_since_s)
            for role, pool in self._seen.pools.items()
            if role in desired
        }
        return {role: count for role, count in late.items() if count}

    def _learn(self, memory: PlannerMemory) -> PlannerMemory:
        seen, now = self._seen, self._now
        peaks = [(at_s, rate) for at_s, rate in memory.peaks if now - at_s <= self._pace.settle_s + seen.window_s]
        until_s = dict.fromkeys(self._expired, now + self._pace.rest_s)
        serving = {role: pool.serving for role, pool in seen.pools.items()}
        is_moving = any(pool.pending_since_s or pool.num_leaving for pool in seen.pools.values())
        has_changed = is_moving or (memory.serving and memory.serving != serving)
        explained_s = seen.at_s if has_changed else memory.explained_s
        factors = memory.learned.factors
        if explained_s <= seen.at_s - seen.window_s:
            elapsed_s = seen.at_s - memory.peaks[-1][0] if memory.peaks else 0.0
            factors, were_late = self._corrected(factors, serving, elapsed_s)
            explained_s = seen.at_s if were_late else explained_s
        profile = learned(memory.learned.profile, seen.at_s, seen.arrival_rate, self._since_last_look(memory))
        return replace(
            memory,
            learned=replace(memory.learned, factors=factors, profile=profile),
            serving=serving,
            explained_s=explained_s,
            peaks=(*peaks, (seen.at_s, self._rate())),
            gave_up_until_s=dict(memory.gave_up_until_s) | until_s,
        )

    def _since_last_look(self, memory: PlannerMemory) -> float:
        last_s = memory.peaks[-1][0] if memory.peaks else -math.inf
        return min(self._seen.window_s, max(0.0, self._seen.at_s - last_s))

    def _corrected(self, factors: LoadFactors, serving: Counts, elapsed_s: float) -> tuple[LoadFactors, bool]:
        """Returns factors with which the model predicts what clients saw, and whether more was late than predicted."""
        seen, rate = self._seen, self._rate()
        first_share = seen.num_begun / max(1, seen.num_ended)
        gap_share = 1.0 - seen.num_slow / max(1, seen.num_begun)
        patience_s = max(self._pace.rest_s, self._pace.settle_s, seen.window_s)
        remaining = math.exp(-elapsed_s / (_FORGET_PATIENCES * patience_s))

        def first(factor: float) -> float:
            return shares_in_time(serving, rate, seen, self._objective, replace(factors, prefill=factor))[0]

        def gaps(factor: float) -> float:
            return shares_in_time(serving, rate, seen, self._objective, replace(factors, decode=factor))[1]

        prefill = _explaining(first, first_share, seen.num_ended, factors.prefill, remaining)
        decode = _explaining(gaps, gap_share, seen.num_begun, factors.decode, remaining)
        changed = LoadFactors(prefill=prefill, decode=decode)
        return changed, prefill > factors.prefill or decode > factors.decode

    def _rate(self) -> float:
        return self._seen.arrival_rate + self._seen.num_waiting / self._pace.backlog_s

    def _offered(self) -> float:
        seen = self._seen
        return expected(self._memory.learned.profile, seen.at_s, self._rate(), self._times.start_s + seen.window_s)

    def _peak(self) -> float:
        recent_s = self._now - self._pace.settle_s
        return max((self._load, *(rate for at_s, rate in self._memory.peaks if at_s >= recent_s)))

    def _attainment(self, counts: Counts, rate: float) -> float:
        return attainment(counts, rate, self._seen, self._objective, self._memory.learned.factors)

    # -- which fleets there could be -----------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[WeighedCounts]:
        roles, limits = tuple(self._fleet), self._limits
        reach = self._reach()
        ranges = [
            sorted(
                {
                    min(limits.most[role], max(limits.least[role], count))
                    for count in range(self._fleet[role] - reach, self._fleet[role] + reach + 1)
                }
            )
            for role in roles
        ]
        for numbers in product(*ranges):
            counts = dict(zip(roles, numbers, strict=True))
            if is_possible(counts) and self._is_allowed(counts):
                rate = self._peak() if self._shrinks(counts) else self._load
                yield WeighedCounts(counts=counts, attainment=self._attainment(counts, rate), cost=self._cost(counts))

    def _is_allowed(self, counts: Counts) -> bool:
        fits = self._num_devices(counts) <= max(self._limits.max_devices, self._num_devices(self._fleet))
        gave_up = self._memory.gave_up_until_s
        added = (role for role in counts if counts[role] > self._fleet[role])
        return fits and not any(gave_up.get(role, 0.0) > self._now for role in added)

    def _reach(self) -> int:
        return REACH if self._seen.num_waiting <= self._seen.num_arrived / 2 else max(REACH, sum(self._fleet.values()))

    def _cost(self, counts: Counts) -> float:
        """Device seconds over the horizon, including the actions."""
        devices, times = self._limits.devices, self._times
        flips = _flips(self._fleet, counts)
        num_flipped = sum(flips.values())
        grown = sum(max(0, counts[role] - self._fleet[role]) for role in counts) - num_flipped
        gone = sum(max(0, self._fleet[role] - counts[role]) for role in counts) - num_flipped
        action_s = grown * times.start_s + gone * times.drain_s + num_flipped * times.flip_s
        return self._pace.horizon_s * self._num_devices(counts) + action_s * max(devices.values())

    def _num_devices(self, counts: Counts) -> int:
        return sum(self._limits.devices[role] * count for role, count in counts.items())

    def _order(self, candidate: WeighedCounts) -> tuple[float, ...]:
        """Sorts fleets that keep the objective by cost; others follow, by how much they miss it."""
        shrinks, allowed = self._shrinks(candidate.counts), 1.0 - self._objective.attainment
        if shrinks:
            allowed *= 1.0 - SPARE
        if 1.0 - candidate.attainment <= allowed:
            return (0.0, candidate.cost)
        share = candidate.attainment
        return (2.0 if shrinks else 1.0, -(round(share, 2) if share > SMALL else float(f"{share:.1e}")), candidate.cost)

    def _shrinks(self, counts: Counts) -> bool:
        return self._num_devices(counts) < self._num_devices(self._fleet)

    # -- what was too small --------------------------------------------------------------------------------------------

    def _work(self, rate: float) -> tuple[float, float]:
        lengths = self._seen.uncached_tokens
        return rate * sum(lengths) / max(1, len(lengths)), rate * self._seen.answer_tokens

    def _found_too_small(self, counts: Counts) -> TooSmall | None:
        if counts == self._fleet or self._num_devices(counts) > self._num_devices(self._fleet):
            return None
        prompt_rate, answer_rate = self._work(self._peak())
        heavy = 1.0 - max(_LIGHTER, _DEVIATIONS / math.sqrt(max(1, self._seen.num_arrived)))
        for small in self._memory.learned.too_small:
            is_as_heavy = prompt_rate >= heavy * small.prompt_rate and answer_rate >= heavy * small.answer_rate
            if self._now < small.until_s and small.has(counts) and is_as_heavy:
                return small
        return None

    def _with_present_one(self) -> tuple[TooSmall, ...]:
        rest_s, now = self._pace.rest_s, self._now
        every, longest_s = self._memory.learned.too_small, _MOST_HOLD_RESTS * rest_s
        remembered = [small for small in every if now - small.until_s < longest_s]
        holds_s = [small.hold_s for small in remembered if small.counts == self._fleet]
        before = max(holds_s, default=_HOLD_RESTS * rest_s / 2.0)
        prompt_rate, answer_rate = self._work(self._load)
        present = TooSmall(
            counts=dict(self._fleet),
            prompt_rate=prompt_rate,
            answer_rate=answer_rate,
            at_s=now,
            hold_s=min(2.0 * before, longest_s),
        )
        return (*(small for small in remembered if small.counts != self._fleet), present)

    def _why_not(self, wanted: WeighedCounts, share: float) -> str:
        if (small := self._found_too_small(wanted.counts)) is not None:
            ago, left = self._now - small.at_s, small.until_s - self._now
            return (
                f"; {_named(wanted.counts)} would do by the model, but {_named(small.counts)} did not {ago:.0f} s ago: "
                f"not tried again for {left:.0f} s"
            )
        if share >= self._objective.attainment or self._is_quiet():
            return ""
        gave_up = {role: until_s for role, until_s in self._memory.gave_up_until_s.items() if until_s > self._now}
        if gave_up:
            named = " and ".join(f"{role} for {until_s - self._now:.0f} s" for role, until_s in gave_up.items())
            return f"; no more workers are ordered of {named}: the last ones did not come"
        return "; no fleet near by that the limits allow keeps the objective"

    # -- not yet -------------------------------------------------------------------------------------------------------

    def _held_back(self) -> str:
        """Returns why no worker may go now, or ""."""
        seen, pace = self._seen, self._pace
        if seen.num_silent:
            return f"fewer workers would do; reports are missing of {counted(seen.num_silent, 'gateway')}"
        if any(pool.num_leaving for pool in seen.pools.values()):
            return "fewer workers would do; one is leaving already"
        if any(pool.pending_since_s for pool in seen.pools.values()) and not self._expired:
            return "fewer workers would do; one is still starting"
        if seen.attainment < self._objective.attainment:
            return "fewer workers should do by the model, but requests are late now"
        settled_s = self._now - min(at_s for at_s, _ in self._memory.peaks)
        needed_s = max(pace.settle_s - seen.window_s, min(pace.settle_s, seen.window_s))
        if settled_s < needed_s:
            return f"fewer workers would do; the load must stay so for {needed_s - settled_s:.0f} s more"
        rested_s = self._now - self._memory.shrunk_s
        if rested_s < pace.rest_s:
            return f"fewer workers would do; the last one went {rested_s:.0f} s ago"
        return ""

    def _shown(self, weighed: Sequence[WeighedCounts]) -> tuple[WeighedCounts, ...]:
        best = tuple(weighed[:_WEIGHED])
        return (*best, *(fleet for fleet in weighed[_WEIGHED:] if dict(fleet.counts) == self._fleet))

    def _keep(self, reason: str, weighed: Sequence[WeighedCounts] = ()) -> FleetDecision:
        return FleetDecision(
            at_s=self._now, counts=self._fleet, reason=reason,
            weighed=self._shown(weighed), memory=self._memory,
        )  # fmt: skip

    def _serve(self, share: float) -> str:
        return "do" if self._is_quiet() else f"serve {share:.1%}"

    def _is_quiet(self) -> bool:
        return not self._seen.num_arrived and not self._seen.num_waiting

    def _state(self, share: float) -> str:
        seen = self._seen
        if self._is_quiet():
            return "no requests"
        line = f", {seen.num_waiting} in line" if seen.num_waiting else ""
        return (
            f"{seen.attainment:.1%} in time at {seen.arrival_rate:.3g} requests/s{line}; {_named(self._fleet)} serve "
            f"{share:.1%} of what comes"
        )


def _explaining(model: Callable[[float], float], share: float, num: int, factor: float, remaining: float) -> float:
    """Returns the load's factor by which `model` predicts the `share` of `num` requests in time. It grows at once, by
    half at most, and shrinks slowly; otherwise the part `remaining` of it stays. A model whose prediction does not
    depend on the factor explains nothing."""
    predicted = model(factor)
    if not num or model(_MOST_FACTOR) == predicted == model(_LEAST_FACTOR):
        return factor
    noise = _DEVIATIONS * math.sqrt((1.0 - predicted + 1.0 / num) / num)
    if share < predicted - max(_DRIFT, noise):
        low, high = factor, min(_MOST_FACTOR, _FASTEST * factor)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            low, high = (middle, high) if model(middle) > share else (low, middle)
        return high
    if share > predicted + _DRIFT:
        return max(_LEAST_FACTOR, 0.98 * factor)
    return 1.0 + remaining * (factor - 1.0) if factor > 1.0 else factor


def is_possible(counts: Counts) -> bool:
    return not any(counts.values()) or any(count for role, count in counts.items() if role is not WorkerRole.PREFILL)


def _flips(before: Counts, after: Counts) -> dict[tuple[WorkerRole, WorkerRole], int]:
    first, second = _FLIPPABLE
    if first not in before or second not in before:
        return {}
    grown = {role: after[role] - before[role] for role in _FLIPPABLE}
    num = min(max(0, grown[second]), max(0, -grown[first]))
    back = min(max(0, grown[first]), max(0, -grown[second]))
    flips = {(first, second): num, (second, first): back}
    return {pair: count for pair, count in flips.items() if count}


def _named(counts: Counts) -> str:
    return " + ".join(f"{count} {role}" for role, count in counts.items())
