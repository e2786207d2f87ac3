"""The nouns that cross a process boundary, as frozen values. `protos.wire` turns them into protobuf and back.
Those of a KV cache's shape are in `protos.kv_layout`.

Units: `_s` seconds, `num_` counts, `_bytes` bytes. Token ids are plain ints; a prompt is a tuple of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, StrEnum

from msgspec.structs import replace

from protos.codec import Value
from protos.kv_layout import ITEM_BYTES as ITEM_BYTES
from protos.kv_layout import LATENT as LATENT
from protos.kv_layout import SCALE as SCALE
from protos.kv_layout import KVGroup as KVGroup
from protos.kv_layout import KVHead as KVHead
from protos.kv_layout import KVLayout as KVLayout
from protos.kv_layout import KVPart as KVPart
from protos.listening import netloc
from protos.release import VERSION, WIRE

BlockHash = bytes
"""16 bytes: chained hash of a full KV block and everything before it (`kvtransfer.hashing`)."""

BLOCK_HASH_BYTES = 16

LOOPBACK = "127.0.0.1"


class WorkerRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class FinishReason(StrEnum):
    """Why a worker sends nothing more about a request. PREFILLED: the first token is out, decode continues.
    MOVED: another worker continues, after all the tokens that were sent."""

    STOP = "stop"
    LENGTH = "length"
    PREFILLED = "prefilled"
    MOVED = "moved"
    ERROR = "error"

    @property
    def is_last(self) -> bool:
        return self not in (FinishReason.PREFILLED, FinishReason.MOVED)


class SpeculationParams(Value, frozen=True, kw_only=True):
    """How a request speculates; its tokens are the same with any of these.

    `mode`: "" as its worker does, or "off". `max_drafts`: drafted tokens of a step, 0: as many as the worker allows.
    `prediction_ids`: tokens that the client expects in the answer. `sources`: those of `SPECULATION_SOURCES` that may
    draft, as far as the worker has them; none: all that it has."""

    mode: str = ""
    max_drafts: int = 0
    prediction_ids: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()


SPECULATION_SOURCES = ("ngram", "suffix", "prediction", "model", "eagle", "medusa", "mtp")
"""Names of proposers."""
MAX_DRAFTS = 32
"""Drafted tokens of a sequence that a step verifies."""


class SamplingParams(Value, frozen=True, kw_only=True):
    """How the next token is chosen. `seed` is always set: the gateway draws one when the client gives none.

    The random number for an output token depends on (seed, its index in the output) alone.
    `max_tokens` and `min_tokens` count every output token, also those made before the request moved here.
    `logprobs` None: none; 0: of the chosen token; k: also the k most likely (before temperature, top-k and top-p).
    `grammar`: what the whole answer must be, in llguidance's Lark; "": anything.
    `pooling`: the vector of the prompt that the request wants, "last" or "mean" of its positions; "": none.
    `label_token_ids`: tokens whose logprobs, with `logprobs`, are behind the most likely ones.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    pooling: str = ""
    speculation: SpeculationParams = SpeculationParams()
    label_token_ids: tuple[int, ...] = ()

    @property
    def needs_decode(self) -> bool:
        """False for a request whose answer is made by the step that completes its prompt."""
        return not self.pooling and not self.label_token_ids


class LaneAddress(Value, frozen=True, kw_only=True):
    """Where to meet a worker: the rendezvous store of its lanes, which serves clients with its `key`. The key is never
    logged or shown: only members of the cluster get this value."""

    worker_id: str
    incarnation: int
    host: str
    port: int
    key: str = ""

    def __repr__(self) -> str:
        return f"LaneAddress({self.worker_id!r}, incarnation={self.incarnation}, {netloc(self.host, self.port)})"


class Ticket(Value, frozen=True, kw_only=True):
    """A decode worker's promise to keep `block_ids` for one request, and the right to write into them.

    The blocks hold tokens [num_cached_tokens, prompt length), in order; `num_cached_tokens` is a multiple of the
    block size. `lease_s` runs from the receipt of the ticket, and anew with each block that arrives and each renewal by
    the gateway. A message of an older generation than the ledger's is dropped.

    With several groups of layers, or a window, `block_ids` has the pages of one group after the other. Those of group g
    begin at block `first_blocks[g]` of the prompt: of a window, where the next token begins to read. All end at `stop`.
    """

    ticket_id: str
    generation: int
    lease_s: float
    block_ids: tuple[int, ...]
    num_cached_tokens: int
    layout: KVLayout
    destination: LaneAddress
    first_blocks: tuple[int, ...] = ()

    @property
    def starts(self) -> tuple[int, ...]:
        """For each group, the index in the prompt's blocks of the first one that is moved."""
        return self.first_blocks or (self.num_cached_tokens // self.layout.block_size,)

    @property
    def stop(self) -> int:
        starts = self.starts
        return (len(self.block_ids) + sum(starts)) // len(starts)

    def tables(self) -> tuple[tuple[int, ...], ...]:
        if not self.first_blocks:
            return (self.block_ids,)
        stop, tables, begin = self.stop, [], 0
        for start in self.first_blocks:
            tables.append(self.block_ids[begin : begin + stop - start])
            begin += stop - start
        return tuple(tables)

    def up_to(self, stop: int) -> Ticket:
        """The ticket for the prompt's first `stop` blocks, or all of fewer. No group's table ends before it begins."""
        stop = max(stop, *self.starts)
        pairs = zip(self.tables(), self.starts, strict=True)
        block_ids = tuple([block_id for table, start in pairs for block_id in table[: stop - start]])
        return replace(self, block_ids=block_ids)


class GenerateRequest(Value, frozen=True, kw_only=True):
    """One sequence to be continued after `prompt_ids + output_ids`.

    `output_ids` are tokens the client has already: the first token when decode takes over from prefill, or all of them
    when the request moves to another pair. `ticket` is where a prefill worker pushes the KV, or which reservation a
    decode worker adopts; None: the worker serves the whole request. `pull` is a reservation on the worker that
    prefills, for the prompt's first blocks, which another worker pushes: without them it computes. With
    `tells_progress` updates report how much of the prompt is computed. A larger `priority` goes first. `number`: its
    short name in the gateway's stream (`StepMessage`). `adapter` is the id of a LoRA adapter; "": the model itself. It
    is part of the salt, as all that KV depends on besides tokens.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    sampling: SamplingParams
    priority: int = 0
    cache_salt: bytes = b""
    ticket: Ticket | None = None
    pull: Ticket | None = None
    number: int = 0
    tells_progress: bool = False
    adapter: str = ""


class ReserveRequest(Value, frozen=True, kw_only=True):
    """Requests blocks into which `source` may write. They are freed after `lease_s` without KV and without a renewal,
    which is the same request with the same `request_id` and `generation`; with a `gateway_id` also when that gateway's
    stream ends. A sequence that grows while it moves needs room for `num_tokens`."""

    request_id: str
    prompt_ids: tuple[int, ...]
    cache_salt: bytes = b""
    generation: int = 1
    lease_s: float = 30.0
    source: LaneAddress
    source_layout: KVLayout
    gateway_id: str = ""
    num_tokens: int = 0


class MoveRequest(Value, frozen=True, kw_only=True):
    """Requests a worker to hand a running sequence over to the ticket's worker. It answers on the stream: MOVED, once
    the rest of the KV is on its way; or an error without a finish reason, and the sequence keeps running there."""

    request_id: str
    ticket: Ticket


class ShareRequest(Value, frozen=True, kw_only=True):
    """Asks a worker to push cached blocks. `hashes`: the chain from the prompt's first block to the ticket's last. Only
    blocks before the first uncached one are pushed."""

    ticket: Ticket
    hashes: tuple[BlockHash, ...]


class TokenLogprob(Value, frozen=True, kw_only=True):
    token_id: int
    logprob: float


class Logprobs(Value, frozen=True, kw_only=True):
    """Natural-log probabilities of one position: the chosen token and the most likely ones, best first. `rank` is the
    chosen token's, from 1 on; 0 is unknown."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()
    rank: int = 0


class ErrorInfo(Value, frozen=True, kw_only=True):
    code: str
    message: str
    param: str = ""
    retry_after_s: float = 0.0


class SequenceUpdate(Value, frozen=True, kw_only=True):
    """The result of one engine step for one request. `num_cached_tokens` is set on the first update that has tokens,
    and with `num_prompt_computed`: the computed tokens of the prompt, cached ones included, if progress was
    requested. An `error` without a `finish_reason` is why a move failed: the request continues here. `embedding`
    is the pooled vector, float32, on the update that ends the prompt. `num_drafted` and `num_accepted`: drafts
    that were verified, and accepted; `num_predicted` and `num_mispredicted`: those from the client's prediction
    that were accepted, and rejected. Counts may come with a later update of the request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    num_cached_tokens: int = 0
    num_prompt_computed: int = 0
    embedding: bytes = b""
    num_predicted: int = 0
    num_mispredicted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def is_plain(self) -> bool:
        return (
            self.finish_reason is None
            and self.error is None
            and bool(self.token_ids)
            and not (self.logprobs or self.prompt_logprobs or self.num_cached_tokens or self.num_prompt_computed)
            and not (self.embedding or self.num_drafted)
        )


class Tier(IntEnum):
    """Where a worker keeps a block: `DEVICE` is the cache that steps read, `HOST` the memory it evicts to and loads
    from.

    A block may be in both. Blocks of a chain in either tier are a prefix unless the worker has reported one as lost,
    and so are those on the device."""

    DEVICE = 0
    HOST = 1


class BlockStored(Value, frozen=True, kw_only=True):
    """Blocks that became a cached prefix, in prompt order; `parent` is the block before the first, b"" at the root."""

    hashes: Sequence[BlockHash]
    parent: BlockHash = b""
    tier: Tier = Tier.DEVICE


class BlockRemoved(Value, frozen=True, kw_only=True):
    """Blocks that one tier dropped; the other may still have them."""

    hashes: Sequence[BlockHash]
    tier: Tier = Tier.DEVICE


class Cleared(Value, frozen=True, kw_only=True):
    """The whole cache is gone, in both tiers."""


KVEvent = BlockStored | BlockRemoved | Cleared


class KVEvents(Value, frozen=True, kw_only=True):
    """Events first_seq, first_seq + 1, ... of one incarnation. A snapshot replaces earlier events; its `first_seq` is
    the number of the next one."""

    incarnation: int
    first_seq: int
    events: tuple[KVEvent, ...]
    snapshot: bool = False


class LaneLoad(Value, frozen=True, kw_only=True):
    """The lanes of a worker that go over one transport for one reason: why it is not a faster one, "" for the fastest.
    All but `num_open` count since the worker's start. Of those lost, some were stuck (nothing moved, though the peer
    had not hung up), and some corrupt (a checksum was wrong)."""

    transport: str
    reason: str = ""
    num_open: int = 0
    num_opened: int = 0
    num_lost: int = 0
    num_stuck: int = 0
    num_corrupt: int = 0


class HostLoad(Value, frozen=True, kw_only=True):
    """Blocks in a worker's host memory. All but the first two count since its start: blocks copied from the device,
    dropped, copied back; prompt tokens loaded, and prompt tokens computed although they were there, because that was
    faster."""

    num_blocks: int = 0
    num_used: int = 0
    num_stored: int = 0
    num_evicted: int = 0
    num_loaded: int = 0
    num_hit_tokens: int = 0
    num_passed_tokens: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0


class DraftCounts(Value, frozen=True, kw_only=True):
    """Verified and accepted drafts of one source, by their position in a draft, from the first on."""

    source: str
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()


class PausedProposer(Value, frozen=True, kw_only=True):
    """A proposer whose drafts did not pay: in its last trial they spared `spared_s` and took `spent_s`. It drafts again
    after `num_steps` steps of the pause."""

    source: str
    num_steps: int
    spared_s: float
    spent_s: float


class SpeculationLoad(Value, frozen=True, kw_only=True):
    """A worker's speculation since its start: the rows of sequences that may speculate, the tokens that they brought,
    and drafts by source. `spared_s`: seconds that accepted drafts spared, of steps that would have made their tokens;
    `spent_s`: by which steps with drafts were longer, and those of the proposers' models."""

    num_rows: int = 0
    num_tokens: int = 0
    spared_s: float = 0.0
    spent_s: float = 0.0
    sources: tuple[DraftCounts, ...] = ()
    paused: tuple[PausedProposer, ...] = ()

    @property
    def num_drafted(self) -> int:
        return sum([sum(counts.drafted_at) for counts in self.sources])

    @property
    def num_accepted(self) -> int:
        return sum([sum(counts.accepted_at) for counts in self.sources])


class WorkerLoad(Value, frozen=True, kw_only=True):
    """A worker's load after a step. `num_free_blocks` counts evictable cached blocks as free. `decode_step_s` is the
    time between two tokens of a sequence: of a step, divided by the tokens that a row brings. `expert_imbalance` is the
    tokens of the most popular expert over the mean of its layer, in the layer where that is highest; 0 where none were
    counted. `expert_rank_imbalance` is that of ranks with whole experts, `expert_placed_imbalance` what it would be if
    experts were placed by load and each rank had room for one more. A `retiring` worker takes requests of its revision
    that have begun, and no others. `num_prompt_tokens` were computed and `num_output_tokens` reported to gateways since
    its start."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_tickets: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    transfer_hidden_s: float = 0.0
    draining: bool = False
    num_pulled_tokens: int = 0
    num_failed_pulls: int = 0
    num_moved: int = 0
    lanes: tuple[LaneLoad, ...] = ()
    host: HostLoad | None = None
    expert_imbalance: float = 0.0
    expert_rank_imbalance: float = 0.0
    expert_placed_imbalance: float = 0.0
    speculation: SpeculationLoad | None = None
    retiring: bool = False
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class Adapter(Value, frozen=True, kw_only=True):
    """A LoRA adapter on a worker, from the folder `path` of its host. `adapter_id`: the digest of its files; `rank`:
    its largest; `num_bytes`: its memory on rank 0."""

    adapter_id: str
    name: str
    path: str
    rank: int
    num_bytes: int


class AdapterList(Value, frozen=True, kw_only=True):
    adapters: tuple[Adapter, ...] = ()


class StepMessage(Value, frozen=True, kw_only=True):
    """The report of one engine step to one gateway. A request that the gateway has numbered, and that has had an
    update, is reported in `numbers` and `token_ids` if the step brought it exactly one token and no other change.
    `role` and `adapters`: the worker's from now on, with the first message and after a change; None: unchanged."""

    updates: tuple[SequenceUpdate, ...] = ()
    events: tuple[KVEvents, ...] = ()
    load: WorkerLoad | None = None
    numbers: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    role: WorkerRole | None = None
    adapters: AdapterList | None = None


class Hello(Value, frozen=True, kw_only=True):
    """A gateway's first message: its id, and the KV events that it needs next."""

    gateway_id: str
    incarnation: int = 0
    next_seq: int = 0


class ModelDigests(Value, frozen=True, kw_only=True):
    """Digests of a model's files (`protos.model_files.digests`); "" where they are not known."""

    weights: str = ""
    tokenizer: str = ""
    template: str = ""


class WorkerInfo(Value, frozen=True, kw_only=True):
    """A worker's report of itself at the handshake. `address` is host:port of its gRPC service. One that
    `reads_further` takes several messages in one. `process_id` is its rank 0's, on its host. `weights` names the
    encoding of its weights and their bits. `revision` names model and settings after a roll, "" before the first;
    `model_path` is where the worker read the model, `digests` are of its files. `wire` and `version` are its
    Baton's. `dtype`: in which it computes; `speculation`: its `worker.speculate`, or "off" where auto does not
    speculate; `model_len`: the model's own longest sequence."""

    worker_id: str
    incarnation: int
    role: WorkerRole
    model: str
    address: str
    layout: KVLayout
    lane: LaneAddress
    max_model_len: int
    vocab_size: int
    device: str = "cpu"
    num_blocks: int = 0
    reads_further: bool = False
    process_id: int = 0
    weights: str = ""
    adapters: tuple[Adapter, ...] = ()
    revision: str = ""
    model_path: str = ""
    digests: ModelDigests = ModelDigests()
    wire: int = WIRE
    version: str = VERSION
    dtype: str = ""
    speculation: str = ""
    model_len: int = 0


class TicketStats(Value, frozen=True, kw_only=True):
    """`direction` "in": blocks reserved here, to be written; "out": pushed from here. `owner` is the other worker."""

    ticket_id: str
    generation: int
    state: str
    owner: str
    age_s: float
    num_bytes: int
    direction: str = "in"


class LaneStats(Value, frozen=True, kw_only=True):
    """A lane to one peer. `busy_s`: time spent moving bytes; `idle_s`: since the last progress. `reason`: why its
    transport is not faster, or why it is in quarantine."""

    peer: str
    transport: str
    state: str
    num_bytes: int
    busy_s: float
    idle_s: float
    reason: str = ""


class TierStats(Value, frozen=True, kw_only=True):
    """The blocks of one tier of a worker, "device" or "host". Of `num_blocks`, `num_used` may not be overwritten now,
    and `num_cached` can be found by prompts. The others count since the start: cached blocks evicted, blocks copied
    from here to the device, and prompt tokens found here."""

    tier: str
    num_blocks: int
    num_used: int
    num_cached: int
    num_evicted: int = 0
    num_loaded: int = 0
    num_hit_tokens: int = 0


class WorkerStats(Value, frozen=True, kw_only=True):
    info: WorkerInfo
    load: WorkerLoad
    tickets: tuple[TicketStats, ...] = ()
    lanes: tuple[LaneStats, ...] = ()
    tiers: tuple[TierStats, ...] = ()


class Health(Value, frozen=True, kw_only=True):
    """Healthy means progress: false when requests are running and no step has finished within the bound."""

    healthy: bool
    reason: str = ""
    since_last_step_s: float = 0.0


class KVPiece(Value, frozen=True, kw_only=True):
    """Part of a ticket's KV: rank 0's bytes of some layers of some blocks. `peer`: the lane's other end; for `hidden_s`
    the sequence was still being computed."""

    peer: str
    ticket_id: str
    num_bytes: int
    first_block: int
    num_blocks: int
    first_layer: int
    num_layers: int
    hidden_s: float = 0.0


class Span(Value, frozen=True, kw_only=True):
    """One part of a step, by the worker's own clock. `step` counts from 1, 0 for what belongs to none in particular;
    `depth` is how many other steps were in flight. `num_read`: positions of KV that the step reads, each once a row;
    `num_attended`: pairs of a computed position and one it looks at. `kv` is what is moved, where that is what took the
    time."""

    name: str
    start_s: float
    duration_s: float
    step: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    depth: int = 0
    kv: KVPiece | None = None
    num_read: int = 0
    num_attended: int = 0


class Profile(Value, frozen=True, kw_only=True):
    """A worker's record of its steps. `num_dropped` older spans are missing; `wall_offset_s` added to a span's times
    gives seconds since 1970."""

    spans: tuple[Span, ...] = ()
    num_dropped: int = 0
    wall_offset_s: float = 0.0
