"""Whether a proposer that computes with a model pays: what its drafts spared against what it took. Pure.

    warm-up ──▶ trial ── paid ──▶ trial ── cost time ──▶ pause ──▶ warm-up ──▶ trial ── cost time ──▶ longer pause

The gate of each step (`lengths`) decides how many drafts to make. It cannot save what a head computes at every step, or
what a draft model computes for a prompt. A trial counts both, over steps without prompts: only of these is it known
what they would have taken without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

WARM_UP_STEPS = 16
"""Not counted: a draft model rebuilds its KV, a head begins at the next block."""
TRIAL_STEPS = 128
LEAST_LOSS = 0.02
"""A trial fails if the proposer cost more than this part of the time of its steps."""
EARLY_STEPS = 32
GREAT_LOSS = 0.25
"""A trial fails after `EARLY_STEPS` if it cost more than this part."""
KEEP = 0.5
"""Weight of a trial that did not fail in the next one."""
PAUSE_STEPS = 2048
MOST_PAUSE_STEPS = 32768
"""A pause has twice the steps of the last one if no trial between them succeeded, up to this number."""


@dataclass(slots=True)
class Payoff:
    """The gains and costs of one proposer. `num_paused` steps remain of its pause; 0: it drafts."""

    spared_s: float = 0.0
    spent_s: float = 0.0
    steps_s: float = 0.0
    num_steps: int = -WARM_UP_STEPS
    pause_steps: int = 0
    num_paused: int = 0

    @property
    def is_paused(self) -> bool:
        return self.num_paused > 0

    def spare(self, seconds: float) -> None:
        if self.num_steps > 0 and not self.is_paused:
            self.spared_s += seconds

    def observe(self, elapsed_s: float, spent_s: float) -> bool:
        """A step without prompts took `elapsed_s`; the proposer's computation, and the step's verification of its
        drafts, took `spent_s`. Returns whether a pause begins or ends with it."""
        if self.is_paused:
            return self.wait()
        self.num_steps += 1
        if self.num_steps <= 0:
            return False
        self.spent_s += spent_s
        self.steps_s += elapsed_s
        if self._has_failed():
            self.pause_steps = self.num_paused = min(max(PAUSE_STEPS, 2 * self.pause_steps), MOST_PAUSE_STEPS)
            return True
        if self.num_steps >= TRIAL_STEPS:
            self.num_steps = self.pause_steps = 0
            self.spared_s, self.spent_s, self.steps_s = KEEP * self.spared_s, KEEP * self.spent_s, KEEP * self.steps_s
        return False

    def wait(self) -> bool:
        """A step during a pause, with prompts or without. Returns whether the pause ends with it."""
        if not self.is_paused:
            return False
        self.num_paused -= 1
        if self.is_paused:
            return False
        self.spared_s = self.spent_s = self.steps_s = 0.0
        self.num_steps = -WARM_UP_STEPS
        return True

    def _has_failed(self) -> bool:
        lost_s = self.spent_s - self.spared_s if self.steps_s else 0.0
        if self.num_steps >= TRIAL_STEPS:
            return lost_s > LEAST_LOSS * self.steps_s
        return self.num_steps >= EARLY_STEPS and lost_s > GREAT_LOSS * self.steps_s
