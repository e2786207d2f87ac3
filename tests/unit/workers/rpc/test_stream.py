"""The messages of a step to a gateway, in as few words as it allows."""

from __future__ import annotations

from dataclasses import replace

from protos.values import FinishReason, SequenceUpdate, StepMessage
from workers.rpc.worker_servicer import GatewayStream


def token(request_id: str, *token_ids: int) -> SequenceUpdate:
    return SequenceUpdate(request_id=request_id, token_ids=token_ids)


def test_requests_go_by_their_numbers_once_they_are_known() -> None:
    stream = GatewayStream("g")
    stream.request_ids |= {"a": 7, "b": 8, "old": 0}  # a gateway that gives no numbers

    def told(*updates: SequenceUpdate) -> StepMessage:
        return stream.message(updates, (), None)

    first = (replace(token("a", 1), num_cached_tokens=4), token("b", 2), token("old", 3))
    assert told(*first) == StepMessage(updates=first)
    last = replace(token("a", 6), finish_reason=FinishReason.LENGTH)
    assert told(token("b", 4), token("old", 5), last) == StepMessage(
        updates=(token("old", 5), last), numbers=(8,), token_ids=(4,)
    )
    assert told(token("b", 1, 2)).updates, "several tokens of a step stay together"
