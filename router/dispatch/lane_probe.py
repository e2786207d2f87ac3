"""Proves a lane with real KV: a worker computes a prompt that no client has sent, another gets its KV and answers.

source: computes the prompt, answers ─▶ destination: reserves ─▶ source: pushes ─▶ destination: answers from the KV"""

from __future__ import annotations

import asyncio
import random
import uuid
from dataclasses import dataclass

from kvtransfer.hashing import chain_hashes
from kvtransfer.windows import moved_bytes
from protos.errors import DeadlineExceeded, InvalidRequest, Overloaded, TransferFailed, WorkerLost
from protos.event_loop import loop_time
from protos.values import (
    GenerateRequest,
    Logprobs,
    ReserveRequest,
    SamplingParams,
    SequenceUpdate,
    ShareRequest,
    Ticket,
    WorkerInfo,
)
from router.fleet.member import Member

COMPUTE_TIMEOUT_S = 4.0
MOVE_TIMEOUT_S = 8.0
FAIR_MOVE_S = 4.0
"""KV that has not arrived in less time says nothing about its lane."""
PROBE_TIMEOUT_S = COMPUTE_TIMEOUT_S + MOVE_TIMEOUT_S
LEASE_S = 10.0
NUM_TOP = 5
TOLERANCE = 0.1
"""Largest difference of log probabilities: a prompt whose prefix was cached runs through kernels of other shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReading:
    """KV of `num_tokens` tokens, in `seconds` from the call to push it to the destination's answer; `computed_s` is how
    long the source took to compute it and to answer. `same`: both answers agree."""

    num_tokens: int
    num_bytes: int
    seconds: float
    computed_s: float
    same: bool


async def probe_lane(
    source: Member, destination: Member, num_tokens: int, *, gateway_id: str, timeout_s: float = PROBE_TIMEOUT_S
) -> LaneReading:
    """Takes `timeout_s` at most. Raises InvalidRequest for a prompt that is too long, Overloaded if the source does not
    compute it in time or little time was left to move its KV, DeadlineExceeded if its KV does not arrive in time,
    WorkerLost, TransferFailed if the KV was not used, and the workers' own errors, such as NoRoom."""
    info, peer = _info(source), _info(destination)
    block = max(info.layout.block_size, peer.layout.block_size)
    num_tokens = max(block, num_tokens // block * block)
    longest = min(info.max_model_len, peer.max_model_len) - 2
    if num_tokens > longest:
        raise InvalidRequest(f"num_tokens={num_tokens}: a prompt of these workers has at most {longest}")
    prompt = tuple(random.choices(range(min(info.vocab_size, peer.vocab_size)), k=num_tokens + 1))
    name = f"probe-{uuid.uuid4().hex}"
    began = loop_time()
    compute_timeout_s = min(COMPUTE_TIMEOUT_S, timeout_s)
    try:
        async with asyncio.timeout(compute_timeout_s):
            computed = await _answer(source, _request(f"{name}-source", prompt))
    except TimeoutError:
        raise Overloaded(
            f"{source.worker_id} has not computed {num_tokens} tokens in {compute_timeout_s:g} s: it is slow, or busy"
        ) from None
    computed_s = loop_time() - began
    move_timeout_s = min(MOVE_TIMEOUT_S, timeout_s - computed_s)
    reservation = ReserveRequest(
        request_id=f"{name}/pull", prompt_ids=prompt[:num_tokens], lease_s=LEASE_S, source=info.lane,
        source_layout=info.layout, gateway_id=gateway_id,
    )  # fmt: skip
    try:
        async with asyncio.timeout(move_timeout_s):
            ticket = await destination.reserve(reservation)
            hashes = tuple(chain_hashes(prompt[:num_tokens], info.layout.block_size))
            began = loop_time()
            num_blocks = await source.connection().share(ShareRequest(ticket=ticket, hashes=hashes))
            pull = ticket.up_to(min(ticket.starts) + num_blocks)
            arrived = await _answer(destination, _request(name, prompt, pull))
            seconds = loop_time() - began
    except TimeoutError:
        if move_timeout_s < min(FAIR_MOVE_S, MOVE_TIMEOUT_S):
            raise Overloaded(
                f"{move_timeout_s:.1f} s are too few to move KV of {num_tokens} tokens: try again"
            ) from None
        raise DeadlineExceeded(
            f"KV of {num_tokens} tokens from {source.worker_id} has not arrived at {destination.worker_id} in "
            f"{move_timeout_s:.1f} s"
        ) from None
    finally:
        for worker in (source, destination):
            worker.abort(reservation.request_id)
    if arrived.num_cached_tokens < num_tokens:
        raise TransferFailed(
            f"{destination.worker_id} used {arrived.num_cached_tokens} of {num_tokens} tokens, and computed the others"
        )
    return LaneReading(
        num_tokens=num_tokens,
        num_bytes=moved_bytes(info.layout, num_tokens),
        seconds=seconds,
        computed_s=computed_s,
        same=_agree(computed, arrived),
    )


def _info(member: Member) -> WorkerInfo:
    if member.info is None or not member.takes_work:
        raise WorkerLost(f"worker {member.worker_id} is {member.state}: {member.reason}")
    return member.info


def _request(name: str, prompt: tuple[int, ...], pull: Ticket | None = None) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=NUM_TOP, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=prompt, sampling=sampling, pull=pull)


async def _answer(member: Member, request: GenerateRequest) -> SequenceUpdate:
    updates = member.submit(request)
    try:
        async for update in updates:
            if update.token_ids:
                return update
    finally:
        member.abort(request.request_id)
    raise WorkerLost(f"worker {member.worker_id} ended a probe without an answer")


def _agree(computed: SequenceUpdate, arrived: SequenceUpdate) -> bool:
    """Compares probabilities, not tokens: two tokens may be equally likely."""
    if not computed.logprobs or not arrived.logprobs:
        return computed.token_ids == arrived.token_ids
    chosen, there = computed.logprobs[0].chosen, _by_id(arrived.logprobs[0])
    return chosen.token_id in there and abs(there[chosen.token_id] - chosen.logprob) < TOLERANCE


def _by_id(entry: Logprobs) -> dict[int, float]:
    return {token.token_id: token.logprob for token in (entry.chosen, *entry.top)}
