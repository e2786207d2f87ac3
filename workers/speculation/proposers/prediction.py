"""Drafts from the client's prediction of the answer (`prediction` of the OpenAI API): an edit returns most of a text.

    prediction   def area(r):  return 3 * r * r     def volume(r): ...
    answer       def area(r):  return pi * r▮       ── after the last matching tokens ──▶  * r     def volume(r): ...

An answer begins where the prediction does. Behind a difference it is found again by its last tokens, as an n-gram is;
of several places the one next to where it was before.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.speculation.proposer import NO_DRAFT, BaseProposer, Draft, DraftQuery, SpeculatedSequence

MATCH = 2
"""Tokens of the answer that find its place in the prediction again."""
FOLLOWED = 16
"""Evidence does not grow beyond this many tokens that followed the prediction."""


@dataclass(slots=True)
class _Place:
    """`at`: the prediction's token expected next; the answer's first `num_seen` tokens have been compared, and the last
    `num_followed` matched."""

    sequence: SpeculatedSequence
    places: dict[tuple[int, ...], list[int]] | None = None
    at: int | None = 0
    near: int = 0  # the place of the last match
    num_seen: int = 0
    num_followed: int = 0


class PredictionProposer(BaseProposer[_Place]):
    """Proposes what follows in the prediction; nothing for sequences without one."""

    name = "prediction"

    def __init__(self) -> None:
        super().__init__(_Place)

    def _draft(self, query: DraftQuery) -> Draft:
        place = self._sequences[query.request_id]
        predicted = place.sequence.prediction_ids
        if not predicted:
            return NO_DRAFT
        for token_id in place.sequence.output_ids[place.num_seen :]:
            place.num_seen += 1
            _follow(place, predicted, token_id)
        if place.at is None or not query.max_drafts:
            return NO_DRAFT
        token_ids = predicted[place.at : place.at + query.max_drafts]
        evidence = min(place.num_followed, FOLLOWED) + 1
        return Draft(token_ids=token_ids, source=self.name, evidence=evidence) if token_ids else NO_DRAFT


def _follow(place: _Place, predicted: tuple[int, ...], token_id: int) -> None:
    if place.at is not None and place.at < len(predicted) and predicted[place.at] == token_id:
        place.at += 1
        place.near = place.at
        place.num_followed += 1
        return
    place.num_followed = 0
    last = tuple(place.sequence.output_ids[max(0, place.num_seen - MATCH) : place.num_seen])
    if place.places is None:
        place.places = _places(predicted)
    after = place.places.get(last, ())
    place.at = min(after, key=lambda at: abs(at - place.near)) if after else None
    place.near = place.near if place.at is None else place.at


def _places(predicted: tuple[int, ...]) -> dict[tuple[int, ...], list[int]]:
    places: dict[tuple[int, ...], list[int]] = {}
    for stop in range(MATCH, len(predicted)):
        places.setdefault(predicted[stop - MATCH : stop], []).append(stop)
    return places
