"""How many drafts of each sequence a step verifies: those that raise the tokens a second of the whole step. Pure.

A step of n positions takes seconds(n) and brings a token of each row, and one for each draft that is accepted.
Positions of all drafts are sorted by the chance that they are reached and accepted, and the step takes the number of
them with the most expected tokens a second (goodput, as in SmartSpec, arXiv 2406.14066). A full batch, whose positions
cost most, takes none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

LEAST_GAIN = 1.03
"""A step with drafts must bring so many times the tokens a second of one without."""


def choose_lengths(
    chains: Sequence[Sequence[float]],
    *,
    num_rows: int,
    num_positions: int,
    budget: int,
    seconds: Callable[[int], float],
) -> list[int]:
    """For each draft, given by the chances of its positions (`Acceptance.chances`), how many of its tokens to verify.

    A step without drafts has `num_positions`, of which `num_rows` bring a token. All drafts together get at most
    `budget`. If all seconds are 0, every position pays."""
    lengths = [0] * len(chains)
    positions = sorted([(-chance, index) for index, chances in enumerate(chains) for chance in chances])
    positions = positions[: max(0, budget)]
    tokens, best_place = float(num_rows), 0
    first_s = seconds(num_positions)
    best = tokens / first_s * LEAST_GAIN if first_s else 0.0
    for place, (chance, _) in enumerate(positions, 1):
        tokens -= chance
        elapsed_s = seconds(num_positions + place)
        if (tokens / elapsed_s if elapsed_s else tokens) > best:
            best, best_place = tokens / elapsed_s if elapsed_s else tokens, place
    for _, index in positions[:best_place]:
        lengths[index] += 1
    return lengths


def may_pay(*, num_rows: int, num_positions: int, nums_drafts: Sequence[int], seconds: Callable[[int], float]) -> bool:
    """Whether some of these numbers of drafts would pay if all were accepted. If not, no proposer is queried."""
    first_s = seconds(num_positions)
    if not first_s:
        return True
    least = num_rows / first_s * LEAST_GAIN
    return any((num_rows + num) / seconds(num_positions + num) > least for num in nums_drafts)


def choose_depth(
    chains: Sequence[Sequence[float]],
    *,
    max_drafts: int,
    num_rows: int,
    num_positions: int,
    seconds: Callable[[int], float],
    drafting: Callable[[int, int], float],
) -> int:
    """How many drafts to compute for each sequence, by the chances of `max_drafts` positions; 0 if none pay,
    `max_drafts` before any measurement. `drafting(rows, drafts)` is the proposer's time in seconds."""
    first_s = seconds(num_positions)
    if not first_s or not chains:
        return max_drafts if chains else 0
    best, best_depth = num_rows / first_s * LEAST_GAIN, 0
    tokens = float(num_rows)
    for depth in range(1, max_drafts + 1):
        tokens += sum([chances[depth - 1] for chances in chains])
        elapsed_s = seconds(num_positions + depth * len(chains)) + drafting(len(chains), depth)
        if tokens / elapsed_s > best:
            best, best_depth = tokens / elapsed_s, depth
    return best_depth
