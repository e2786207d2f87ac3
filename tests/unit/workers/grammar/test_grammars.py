"""Rows under a grammar, in an engine around the toy model: each token depends on all before, and is the same anyhow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import pytest

from protos.errors import InvalidRequest
from protos.values import FinishReason
from tests.unit.workers.harness import VOCAB, ToyEngine, ask, by_hand
from workers.batch import Sample
from workers.grammar.grammar_seam import Mask, without

EOS = 0


def mask_of(allowed: list[int]) -> Mask:
    bits = np.zeros(-(-VOCAB // 32) * 32, dtype=np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class Summing:
    """A token is as the sum of all before, modulo 7; one from the tenth on is the end. "broken" fails at the third.

    It takes so many looks (`slow`) until a newcomer's first mask is there, and one that shows to be late only as it is
    needed: every so many (`hasty`) are that."""

    def __init__(self, slow: int = 0, hasty: int = 0) -> None:
        self.listener: Callable[[], None] = lambda: None
        self.slow, self.hasty = slow, hasty
        self.num_asked = 0
        self.known: dict[str, int] = {}

    def begin(self, request_id: str, grammar: str, output_ids: tuple[int, ...]) -> None:
        if grammar == "unknown":
            raise InvalidRequest("nobody knows this grammar", param="grammar")
        self.known.setdefault(request_id, self.slow)

    def pending(self) -> set[str]:
        self.known = {name: max(0, looks - 1) for name, looks in self.known.items()}
        return {name for name, looks in self.known.items() if looks}

    def release(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            self.known.pop(request_id, None)

    def __len__(self) -> int:
        return len(self.known)

    def draft(self, request_id: str, draft_ids: tuple[int, ...]) -> None: ...

    def allowed_after(self, request_id: str, samples: Sequence[Sample]) -> Sequence[Mask]:
        masks = [self._mask(sample) for sample in samples]
        return masks[1:]

    def allowed(self, request_id: str, sample: Sample) -> Mask | None:
        assert len(sample.output_ids) == sample.index, "every token before is known"
        assert not self.known[request_id], "it was planned too early"
        self.num_asked += 1
        if self.hasty and self.num_asked % self.hasty == 0:
            self.known[request_id] = self.slow
            return None
        if sample.params.grammar == "broken" and sample.index == 2:
            raise InvalidRequest("this grammar is broken", param="grammar")
        return self._mask(sample)

    def _mask(self, sample: Sample) -> Mask:
        total = sum(sample.output_ids)
        allowed = [EOS] if sample.index >= 10 + total % 5 else [*range(7 + total % 7, VOCAB, 7)]
        return without(mask_of(allowed), sample.banned_ids)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [64, 12])
def test_tokens_do_not_depend_on_steps_in_flight_or_preemption(depth: int, num_blocks: int) -> None:
    """Beside a free request, which is not touched."""
    requests = [ask(str(i), range(i, i + 6), 20, grammar="sums", temperature=float(i % 2), seed=i) for i in range(4)]
    free = ask("free", range(50, 56), 20)
    plain = ToyEngine(grammars=Summing(), eos_ids=(EOS,)).serve(*requests, free)
    toy = ToyEngine(grammars=Summing(), eos_ids=(EOS,), depth=depth, num_blocks=num_blocks)
    assert toy.serve(*requests, free) == plain or num_blocks == 12  # then fewer blocks were found in the cache
    assert {name: output.token_ids for name, output in toy.answers.items()} == {
        n: output.token_ids for n, output in plain.items()
    }
    assert (toy.scheduler.num_preemptions > 0) == (num_blocks == 12)
    assert plain["free"].token_ids == by_hand(range(50, 56), 20)
    for request in requests:
        *told, last = plain[request.request_id].token_ids
        assert all((token_id - sum(told[:index])) % 7 == 0 for index, token_id in enumerate(told))
        assert (last, plain[request.request_id].finish_reason) == (EOS, FinishReason.STOP)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_blocks", [64, 12])
@pytest.mark.parametrize("hasty", [1000, 2, 3])
def test_who_is_late_gets_the_same_tokens_and_holds_up_nobody(depth: int, num_blocks: int, hasty: int) -> None:
    requests = [ask(str(i), range(i, i + 6), 20, grammar="sums", temperature=float(i % 2), seed=i) for i in range(3)]
    requests.append(ask("p", range(8), 20, grammar="sums", prompt_logprobs=0))
    free = ask("free", range(50, 56), 20)
    plain = ToyEngine(grammars=Summing(), eos_ids=(EOS,)).serve(*requests, free)
    toy = ToyEngine(grammars=Summing(slow=4, hasty=hasty), eos_ids=(EOS,), depth=depth, num_blocks=num_blocks)
    toy.submit(*requests, free)
    toy.step(3)
    assert toy.scheduler.num_waiting == len(requests), "newcomers begin when their first token can be chosen"
    toy.step(17 + depth)
    assert num_blocks == 12 or toy.answers["free"].finish_reason is FinishReason.LENGTH, "a token at every step"
    assert {name: output.token_ids for name, output in toy.finish().items()} == {
        n: output.token_ids for n, output in plain.items()
    }
    assert toy.answers["p"].prompt_logprobs == plain["p"].prompt_logprobs


@pytest.mark.parametrize("num_given", [1, 3])
def test_another_engine_goes_on_with_the_same_tokens(num_given: int) -> None:
    request = ask("a", range(9), 20, grammar="sums")
    whole = ToyEngine(grammars=Summing(), eos_ids=(EOS,)).serve(request)["a"].token_ids
    rest = ask("a", range(9), 20, grammar="sums", output_ids=whole[:num_given])
    assert ToyEngine(grammars=Summing(), eos_ids=(EOS,)).serve(rest)["a"].token_ids == whole[num_given:]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_grammar_that_fails_ends_its_own_request(depth: int) -> None:
    toy = ToyEngine(grammars=Summing(), eos_ids=(EOS,), depth=depth)
    answers = toy.serve(ask("a", range(6), 9, grammar="broken"), ask("b", range(7), 9))
    assert (answers["a"].finish_reason, len(answers["a"].token_ids)) == (FinishReason.ERROR, 2)
    error = answers["a"].error
    assert error is not None
    assert (error.code, error.message, error.param) == ("invalid_request", "this grammar is broken", "grammar")
    assert answers["b"].token_ids == by_hand(range(7), 9)


def test_nothing_is_kept_of_who_goes() -> None:
    grammars = Summing()
    toy = ToyEngine(grammars=grammars, eos_ids=(EOS,))
    toy.submit(ask("a", range(6), 9, grammar="sums"), ask("b", range(5), 4, grammar="sums"), ask("c", [1], 4))
    toy.step(2)
    assert sorted(grammars.known) == ["a", "b"]
    toy.engine.abort(["a", "nobody"])
    assert list(grammars.known) == ["b"]
    toy.finish()
    assert not grammars.known


def test_impossible_constraints_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no grammars"):
        ToyEngine().submit(ask("a", [1], grammar="sums"))
    toy = ToyEngine(grammars=Summing())
    with pytest.raises(InvalidRequest, match="nobody knows"):
        toy.submit(ask("a", [1], grammar="unknown"))
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        toy.submit(ask("a", [1], grammar="sums", ignore_eos=True))
    toy.engine.assert_idle()


def test_bans_give_way_where_nothing_else_is_left() -> None:
    both, only = mask_of([EOS, 31, 32, 63]), mask_of([EOS])
    assert np.array_equal(without(both, (EOS, 63)), mask_of([31, 32]))
    assert np.array_equal(without(both, ()), both)
    assert np.array_equal(without(only, (EOS, 63)), only)
