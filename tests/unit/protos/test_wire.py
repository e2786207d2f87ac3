"""Every value survives the way through bytes, and every error keeps its type."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from protos import errors, values
from protos.chain import Chain
from protos.codec import Value
from protos.wire import error_info, from_proto, raised, to_proto

LAYOUT = values.KVLayout.dense(num_layers=2, num_kv_heads=4, head_dim=16, block_size=16, dtype="bfloat16", tp=2)
LATENT = values.KVPart(name="latent", heads=1, width=576, dtype="bfloat16", cut_by_heads=False)
HEAD = values.KVHead(name="eagle:1", num_layers=1, parts=(LATENT,))
GROUPED = values.KVLayout(
    groups=(
        values.KVGroup(layers=(0, 2), parts=(LATENT,)),
        values.KVGroup(layers=(1,), parts=LAYOUT.parts, window=128),
    ),
    block_size=16,
)
LANE = values.LaneAddress(worker_id="decode-0", incarnation=7, host="127.0.0.1", port=4711)
TICKET = values.Ticket(
    ticket_id="r1", generation=3, lease_s=30.0, block_ids=(5, 9), num_cached_tokens=16, layout=LAYOUT, destination=LANE
)
SPECULATION = values.SpeculationParams(mode="off", max_drafts=3, prediction_ids=(1, 4095), sources=("ngram",))
SAMPLING = values.SamplingParams(
    temperature=0.7,
    logit_bias=((3, -100.0), (4, 1.5)),
    seed=2**63 + 1,
    logprobs=0,
    stop_token_ids=(2, 3),
    speculation=SPECULATION,
)
LOGPROBS = values.Logprobs(
    chosen=values.TokenLogprob(token_id=1, logprob=-0.5), top=(values.TokenLogprob(token_id=1, logprob=-0.5),), rank=1
)
LANES = values.LaneLoad(transport="gloo", reason="another host", num_open=2, num_opened=7, num_lost=5, num_corrupt=1)
HOST = values.HostLoad(num_blocks=64, num_used=9, num_hit_tokens=2**33, load_s=0.25)
DRAFTS = values.SpeculationLoad(
    num_rows=9,
    num_tokens=20,
    spared_s=0.5,
    sources=(values.DraftCounts(source="ngram", drafted_at=(20, 10), accepted_at=(8, 3)),),
    paused=(values.PausedProposer(source="eagle", num_steps=2048, spared_s=0.5, spent_s=2.0),),
)
LOAD = values.WorkerLoad(
    step=3, num_running=2, num_blocks=10, draining=True, lanes=(LANES,), host=HOST, speculation=DRAFTS
)
ADAPTER = values.Adapter(adapter_id="ab" * 16, name="sql", path="/adapters/sql", rank=8, num_bytes=4096)
DIGESTS = values.ModelDigests(weights="ab", tokenizer="cd", template="ef")
INFO = values.WorkerInfo(
    worker_id="decode-0",
    incarnation=7,
    role=values.WorkerRole.DECODE,
    model="demo",
    address="127.0.0.1:1",
    layout=LAYOUT,
    lane=LANE,
    max_model_len=2048,
    vocab_size=4096,
    adapters=(ADAPTER,),
    digests=DIGESTS,
)
HASHES = (bytes(range(16)), bytes(range(16, 32)))
EVENTS = values.KVEvents(
    incarnation=7,
    first_seq=4,
    events=(
        values.BlockStored(hashes=Chain.of(HASHES), parent=bytes(16)),
        values.BlockStored(hashes=Chain.of(HASHES)),
        values.BlockRemoved(hashes=Chain.of(HASHES[:1])),
        values.BlockStored(hashes=Chain.of(HASHES), tier=values.Tier.HOST),
        values.BlockRemoved(hashes=Chain.of(HASHES), tier=values.Tier.HOST),
        values.Cleared(),
    ),
    snapshot=True,
)
UPDATES = (
    values.SequenceUpdate(request_id="a", token_ids=(1, 2), logprobs=(LOGPROBS, LOGPROBS), num_cached_tokens=16),
    values.SequenceUpdate(request_id="b", finish_reason=values.FinishReason.PREFILLED),
    values.SequenceUpdate(
        request_id="b", finish_reason=values.FinishReason.STOP, num_predicted=7, num_mispredicted=2, num_drafted=9
    ),
    values.SequenceUpdate(request_id="c", error=values.ErrorInfo(code="worker_lost", message="gone")),
)
REQUEST = values.GenerateRequest(
    request_id="a", prompt_ids=(1, 2, 3), sampling=SAMPLING, cache_salt=b"s", ticket=TICKET
)

SPAN = values.Span(name="launch", start_s=1.5, duration_s=0.25, step=7, num_rows=2, num_tokens=65, depth=1)
KV = values.KVPiece(
    peer="d#1", ticket_id="t", num_bytes=64, first_block=2, num_blocks=3, first_layer=4, num_layers=5, hidden_s=0.5
)
TIER = values.TierStats(
    tier="host", num_blocks=9, num_used=1, num_cached=8, num_evicted=3, num_loaded=4, num_hit_tokens=5
)

SAMPLES = [
    SPECULATION,
    SAMPLING,
    LAYOUT,
    LATENT,
    HEAD,
    *GROUPED.groups,
    GROUPED,
    replace(LAYOUT, head=HEAD),
    replace(GROUPED, head=HEAD),
    LANE,
    TICKET,
    REQUEST,
    values.GenerateRequest(request_id="b", prompt_ids=(1,), output_ids=(9,), sampling=values.SamplingParams()),
    values.GenerateRequest(request_id="c", prompt_ids=(1,), sampling=values.SamplingParams(), pull=TICKET),
    values.ReserveRequest(request_id="a", prompt_ids=(1,), source=LANE, source_layout=LAYOUT, num_tokens=9),
    values.MoveRequest(request_id="a", ticket=TICKET),
    values.ShareRequest(ticket=TICKET, hashes=HASHES),
    LOGPROBS.chosen,
    LOGPROBS,
    values.ErrorInfo(code="c", message="m", param="p", retry_after_s=1.5),
    *UPDATES,
    *EVENTS.events,
    EVENTS,
    LANES,
    HOST,
    DRAFTS,
    *DRAFTS.sources,
    *DRAFTS.paused,
    LOAD,
    values.StepMessage(updates=UPDATES, events=(EVENTS,), load=LOAD),
    values.StepMessage(),
    ADAPTER,
    DIGESTS,
    values.AdapterList(),
    values.StepMessage(adapters=values.AdapterList(adapters=(ADAPTER,))),
    values.StepMessage(adapters=values.AdapterList()),
    values.Hello(gateway_id="g", incarnation=1, next_seq=2),
    INFO,
    values.TicketStats(ticket_id="t", generation=1, state="reserved", owner="prefill-0", age_s=0.5, num_bytes=4096),
    values.LaneStats(peer="p", transport="inproc", state="open", num_bytes=1, busy_s=0.5, idle_s=0.25, reason="why"),
    TIER,
    values.WorkerStats(info=INFO, load=LOAD, tiers=(TIER,)),
    values.Health(healthy=False, reason="stuck", since_last_step_s=9.5),
    SPAN,
    KV,
    values.Profile(
        spans=(SPAN, values.Span(name="KV send", start_s=1.0, duration_s=0.5, kv=KV)),
        num_dropped=3,
        wall_offset_s=1.5e9,
    ),
]


def test_every_message_has_a_sample() -> None:
    kinds = {kind for kind in vars(values).values() if isinstance(kind, type) and issubclass(kind, Value)}
    assert {type(sample) for sample in SAMPLES} == kinds - {Value}


@pytest.mark.parametrize("value", SAMPLES, ids=lambda value: type(value).__name__)
def test_a_value_survives_the_wire(value: object) -> None:
    message = to_proto(value)
    again = type(message).FromString(message.SerializeToString())
    decoded = from_proto(type(value), again)
    assert _approx(decoded) == _approx(value)


def _approx(value: object) -> object:
    return repr(value)


@pytest.mark.parametrize("kind", [errors.ERRORS_BY_CODE[code] for code in sorted(errors.ERRORS_BY_CODE)])
def test_an_error_keeps_its_type_and_its_words(kind: type[errors.BatonError]) -> None:
    sent = kind("what went wrong", param="max_tokens", retry_after_s=2.5)
    again = raised(error_info(sent))
    assert type(again) is (errors.Internal if kind is errors.BatonError else kind)
    assert (again.message, again.param, again.retry_after_s) == ("what went wrong", "max_tokens", 2.5)


@pytest.mark.parametrize("kind", [errors.Misconfigured, ValueError])
def test_an_error_that_names_a_file_of_no_utf_8_crosses_the_wire(kind: type[Exception]) -> None:
    """Neither msgpack nor protobuf encodes a lone surrogate."""
    info = from_proto(values.ErrorInfo, to_proto(error_info(kind("/models/\udcff is not there"))))
    assert info.message.endswith(r"/models/\udcff is not there")


def test_codes_are_unique_and_statuses_are_errors() -> None:
    kinds = [kind for kind in _below(errors.BatonError) if kind.__module__ == errors.__name__]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all(400 <= kind.http_status < 600 for kind in kinds)


def _below(root: type[errors.BatonError]) -> Iterator[type[errors.BatonError]]:
    for child in root.__subclasses__():
        yield child
        yield from _below(child)


def test_an_unknown_code_of_a_newer_peer_is_an_internal_error() -> None:
    assert type(errors.error_from_code("from_the_future", "?")) is errors.Internal


def test_a_foreign_exception_is_reported_as_ours() -> None:
    info = error_info(ZeroDivisionError("division by zero"))
    assert info.code == "internal_error"
    assert "ZeroDivisionError" in info.message
