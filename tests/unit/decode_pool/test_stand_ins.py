"""A prefill worker does the decode pool's work: whole requests, and sequences that come from a decode worker."""

from __future__ import annotations

from dataclasses import replace

from protos.values import FinishReason, GenerateRequest, MoveRequest, ReserveRequest, SamplingParams
from tests.unit.decode_pool.pair import (
    DECODE,
    DECODE_WEIGHT,
    LAYOUT,
    LEASE_S,
    PREFILL_WEIGHT,
    Pair,
    prompt,
)
from tests.unit.decode_pool.test_moving import made_by
from workers.scheduling.role import Role

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def asked(request_id: str = "r") -> GenerateRequest:
    return GenerateRequest(request_id=request_id, prompt_ids=prompt(9), sampling=GREEDY)


def test_a_prefill_worker_serves_a_whole_request() -> None:
    pair = Pair()
    pair.prefill.engine.submit(asked(), pair.now)
    pair.finish()
    assert pair.prefill.tokens["r"] == made_by([PREFILL_WEIGHT] * 20, prompt(9), GREEDY)


def test_it_continues_an_answer_of_a_dead_decode_worker() -> None:
    pair = Pair()
    pair.decode.engine.submit(asked(), pair.now)
    pair.step(5)
    tokens = pair.decode.tokens["r"]
    pair.prefill.engine.submit(replace(asked(), request_id="r.2", output_ids=tokens), pair.now)
    pair.decode.engine.abort(["r"])
    pair.finish()
    weights = [DECODE_WEIGHT] * len(tokens) + [PREFILL_WEIGHT] * (20 - len(tokens))
    assert tokens + pair.prefill.tokens["r.2"] == made_by(weights, prompt(9), GREEDY)


def moves(pair: Pair) -> None:
    """Moves the sequence "r" from decode to prefill, as a gateway would."""
    tokens = asked().prompt_ids + pair.decode.tokens["r"]
    ticket = pair.prefill_role.reserve(
        ReserveRequest(
            request_id="r.2",
            prompt_ids=tokens[:-1],
            num_tokens=len(tokens) + 15,
            source=DECODE,
            source_layout=LAYOUT,
            lease_s=LEASE_S,
        ),
        pair.now,
    )
    pair.decode.engine.migrate(MoveRequest(request_id="r", ticket=ticket), pair.now)
    while pair.decode.ended.get("r") is not FinishReason.MOVED:
        pair.step()
    after = replace(asked(), request_id="r.2", output_ids=pair.decode.tokens["r"], ticket=ticket)
    pair.prefill.engine.submit(after, pair.now)


def test_it_takes_over_sequences_without_computing_them_again() -> None:
    pair = Pair()
    pair.decode.engine.submit(asked(), pair.now)
    pair.step(5)
    moves(pair)
    said = pair.decode.tokens["r"]
    pair.finish()
    weights = [DECODE_WEIGHT] * len(said) + [PREFILL_WEIGHT] * (20 - len(said))
    assert said + pair.prefill.tokens["r.2"] == made_by(weights, prompt(9), GREEDY)
    assert pair.prefill.runner.num_computed == 20 - len(said), "its KV came along: a token a step"


def test_it_takes_promised_sequences_while_it_drains() -> None:
    pair = Pair()
    pair.decode.engine.submit(asked(), pair.now)
    pair.step(5)
    pair.prefill.engine.drain()
    moves(pair)
    pair.finish()
    assert len(pair.decode.tokens["r"] + pair.prefill.tokens["r.2"]) == 20


def test_both_roles_keep_blocks_reserved_for_a_moving_sequence() -> None:
    pair = Pair()
    ticket = pair.reserve("r", prompt(12))
    roles: tuple[Role, Role] = (pair.decode_role, pair.prefill_role)
    request = replace(asked(), prompt_ids=prompt(12), ticket=ticket)
    assert [role.has_reservation(request) for role in roles] == [True, False]
    pair.decode_role.withdraw("r")
    pair.finish()
