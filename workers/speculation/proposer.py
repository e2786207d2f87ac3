"""The seam between the engine and what proposes drafts (docs/adr/0050). No torch.

    begin ──▶ computed ──▶ propose ──▶ the step verifies the drafts ──▶ computed ──▶ propose ──▶ ... ──▶ end
    submit    a step of it was applied                                                     finished, aborted or moved

A draft changes no token: the sampler chooses each position as it would without drafts, and a row ends after the first
position whose token differs from the draft. So a proposer may be wrong, and may forget everything; only time depends on
it. A sequence that continues here after a failure, a move or a preemption begins with the tokens that it has.

The engine's thread calls a proposer between two steps. A proposer must not wait for anything but its own computation.

A proposer that computes with a model (a draft model, EAGLE, Medusa, MTP; docs/adr/0057):

- keeps KV under the page numbers of the worker: page p of its own storage belongs to page p of the pool. Of a draft
  model, `DraftPages` knows which pages it has written, from the hashes of their blocks. A head writes every page that
  the model writes, and its KV goes where the model's goes, so that pages with KV have the head's as well;
- reads the target's hidden states from `HiddenStates` in `computed`, if it is a head of the target;
- gets every chunk of a prompt and every verified token by `computed` if `ProposerNeeds.every_step`;
- computes on every rank: rank 0's part is wrapped by `Leader.everywhere`, as the host tier's copies are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

from protos.codec import Value
from protos.values import SamplingParams
from workers.speculation.cost import StepSeconds

Tensor_co = TypeVar("Tensor_co", covariant=True)
State = TypeVar("State")


class SpeculatedSequence(Protocol):
    """The part of a request that a proposer reads. It is the scheduler's own: `output_ids` grows in place with
    verified tokens, and a proposer changes nothing."""

    @property
    def request_id(self) -> str: ...

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def output_ids(self) -> list[int]: ...

    @property
    def cache_salt(self) -> bytes:
        """Sequences with different salts must not learn from each other."""
        ...

    @property
    def prediction_ids(self) -> tuple[int, ...]:
        """Tokens that the client expects in the answer; most clients send none."""
        ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def tables(self) -> list[list[int]]:
        """The pages of the running sequence's known tokens, for each group of layers."""
        ...

    @property
    def hashes(self) -> list[bytes]:
        """Salted hashes of the sequence's full blocks that are known."""
        ...


class DraftQuery(Value, frozen=True, kw_only=True):
    """Requests at most `max_drafts` tokens after the last known token of a sequence."""

    request_id: str
    max_drafts: int


class Draft(Value, frozen=True, kw_only=True):
    """Proposed tokens, in order; none if the proposer has no guess.

    `evidence` sorts drafts of one source: drafts of equal evidence are accepted about equally often, and that rate is
    learned for each (`Acceptance`). For a match of tokens it is the length of the match; a model may give 0 always.
    """

    token_ids: tuple[int, ...] = ()
    source: str = ""
    evidence: int = 0


NO_DRAFT = Draft()


class ComputedRow(Value, frozen=True, kw_only=True):
    """Positions [start, start + len(token_ids)) of a sequence, whose KV the last step computed and whose tokens are
    verified. `next_id` is the token after them: of the prompt, or sampled. `first_hidden` is the place of `start` among
    the positions of `HiddenStates`: rejected drafts follow the verified ones there. `pages` are those of the sequence's
    blocks in the first group; `goes_on` False: it has ended here, or is on its way to another worker."""

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    next_id: int
    first_hidden: int
    pages: tuple[int, ...] = ()
    prompt_len: int = 0
    goes_on: bool = True


class HiddenStates(Protocol[Tensor_co]):
    """The hidden states of the last launched step, on this rank's device."""

    def at(self, layer: int) -> Tensor_co:
        """[T, E]: the input of `layer` (one of `ProposerNeeds.hidden_layers`; the number of layers means the final
        norm's output) at the step's positions, in the order of its rows. Valid until the next launch."""
        ...


class ProposerNeeds(Value, frozen=True, kw_only=True):
    """Inputs that a proposer needs besides tokens. Without `every_step`, `computed` is never called. With `every_row`
    it also gets rows of other and ended sequences, because their blocks may serve others."""

    every_step: bool = False
    every_row: bool = False
    hidden_layers: tuple[int, ...] = ()


class Proposer(Protocol):
    """Proposes drafts for the sequences of one engine. No call raises for what a sequence contains.

    `name` is the `source` of its drafts, and its label in metrics.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> ProposerNeeds: ...

    def begin(self, sequence: SpeculatedSequence) -> None:
        """A sequence was submitted, perhaps with output tokens. Called once before any other call for it."""
        ...

    def computed(self, rows: Sequence[ComputedRow]) -> None:
        """Receives the rows of an applied step, of running sequences or of all. A preempted sequence computes its
        positions again, from the start or from a cached prefix."""
        ...

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Draft]:
        """One draft for each query, in their order. Called for sequences that have begun. With steps in flight it is
        called up to twice a step, and then first for sequences with a token in flight that is not among their tokens:
        those drafts only show whether to wait for that token. A proposer that computes with a model has no steps in
        flight: it is called at most once a step, and all tokens are known."""
        ...

    def end(self, request_id: str) -> None:
        """The sequence has ended here, by a stop, an abort, a failure or a move; `output_ids` holds its last token.
        Its state can be dropped."""
        ...

    def __len__(self) -> int:
        """Number of sequences that have begun and not ended."""
        ...


@runtime_checkable
class TimedProposer(Protocol):
    """A proposer whose computation takes time: `Speculation` queries it for so many drafts as pay, and pauses it
    where it costs more than it spares (`workers.speculation.payoff`)."""

    @property
    def name(self) -> str: ...

    def skipped(self, rows: Sequence[ComputedRow]) -> None:
        """Replaces `computed` while the proposer is paused: it computes nothing of these rows. Called for every step if
        any proposer has `ProposerNeeds.every_step`."""
        ...

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        """Seconds that `propose` takes for `num_rows` sequences with `num_drafts` drafts each; 0 until it was
        measured."""
        ...

    def take_seconds(self) -> float:
        """Seconds of computation since the last call, in `computed` and in `propose`."""
        ...


class BaseProposer(Generic[State]):
    """A `Proposer` that keeps the state made by `remember` for each sequence, and reads no steps."""

    needs = ProposerNeeds()

    def __init__(self, remember: Callable[[SpeculatedSequence], State]) -> None:
        self._remember = remember
        self._sequences: dict[str, State] = {}

    def begin(self, sequence: SpeculatedSequence) -> None:
        self._sequences[sequence.request_id] = self._remember(sequence)

    def computed(self, rows: Sequence[ComputedRow]) -> None: ...

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Draft]:
        return [self._draft(query) for query in queries]

    def _draft(self, query: DraftQuery) -> Draft:
        raise NotImplementedError

    def end(self, request_id: str) -> None:
        del self._sequences[request_id]

    def __len__(self) -> int:
        return len(self._sequences)


class ModelProposer(BaseProposer[State]):
    """The part of a `TimedProposer` that counts what its model took, by `clock` in seconds."""

    def __init__(self, remember: Callable[[SpeculatedSequence], State], clock: Callable[[], float]) -> None:
        super().__init__(remember)
        self._clock = clock
        self._cost = StepSeconds()
        self._spent_s = 0.0

    def skipped(self, rows: Sequence[ComputedRow]) -> None:
        """Does nothing: a model that reads only tokens computes missing ones at its next query."""

    def take_seconds(self) -> float:
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s
