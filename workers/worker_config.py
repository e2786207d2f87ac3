"""Settings of a worker's parts. A value out of range raises Misconfigured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from kvtransfer.lane_rules import LaneConfig
from protos.errors import Misconfigured
from protos.setting import check_settings, setting
from protos.values import LOOPBACK, MAX_DRAFTS
from workers.adapters.names import parse_adapters
from workers.cores import parse_cpus
from workers.speculation.registry import check_mode
from workers.weights.weight_formats import Quantize

GPU_FRACTION, RAM_FRACTION = 0.9, 0.2  # of the memory for KV, by default
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float32"]
KVDtype = Literal["auto", "int8", "fp8"]
MAX_STEPS_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds of a step and of the batch."""

    max_num_batched_tokens: int = setting(2048, "Tokens of one step.", least=1)
    max_num_seqs: int = setting(64, "Sequences in a step; more share time slices.", least=1)
    prefill_chunk: int = setting(512, "Tokens of one prompt in a step.", unit="tokens", least=1)
    max_waiting: int = 1024  # requests that have not begun; more are refused
    time_slice_s: float = 10.0  # time slice of a sequence while more than max_num_seqs have begun

    @property
    def largest_chunk(self) -> int:
        return min(self.prefill_chunk, self.max_num_batched_tokens)

    def step_limits(self) -> dict[str, Any]:
        return {spec.name: getattr(self, spec.name) for spec in fields(StepLimits)}

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise Misconfigured(
                f"max_num_seqs = {self.max_num_seqs}: give at most max_num_batched_tokens, "
                f"{self.max_num_batched_tokens}",
                param="max_num_seqs",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(StepLimits):
    """The model that a worker serves, with which settings, and how much of the machine it takes.

    The KV cache has `num_blocks` blocks, by default as many as fit into `memory_fraction` of a GPU's memory, model and
    activations included (0.9), or of the RAM free at the start, the cache alone (0.2: workers share a host).
    On a CPU host tier and cache are the same memory, and a larger cache serves better.
    A sequence that is paused for another one's time slice keeps its KV.
    `revision` names the settings after a roll; workers of different revisions exchange no KV.
    """

    model: str = field(metadata={"help": "A checkpoint's folder, a GGUF file, or a hub's name.", "unit": "path"})
    served_name: str = setting("", "What clients call the model; default: its folder's or file's name.")
    device: Device = setting("auto", "auto: GPUs if there are enough.")
    dtype: Dtype = setting("auto", "Of weights, and of KV if kv_dtype is auto; auto: that of the checkpoint.")
    kv_dtype: KVDtype = setting("auto", "Of KV; int8: scales of each token and head; fp8: the checkpoint's scales.")
    quantize: Quantize = setting("off", "Round the linear weights of a float checkpoint as they are loaded.")
    tp: int = setting(1, "Tensor-parallel ranks of every worker.", least=1)
    expert_parallel: bool = setting(False, "Whole experts on ranks, in place of a share of each expert's columns.")
    block_size: int = setting(16, "Tokens of a KV block.", unit="tokens", least=1)
    num_blocks: int | None = setting(None, "Blocks of the KV cache; default: as memory_fraction allows.", least=1)
    memory_fraction: float | None = setting(
        None, "Share of memory for the KV cache; default: 0.9 on a GPU, 0.2 on a CPU.", above=0, most=1
    )
    host_kv_gib: float = setting(0.0, "Host memory of a worker for KV that its device evicts.", least=0, below=math.inf)
    free_windows: bool = True  # free KV behind sliding windows while a sequence runs, and do not transfer it
    speculate: str = setting(
        "off",
        "Drafts of next tokens: auto (ngram and suffix), off, ngram, suffix, model:PATH, eagle:PATH, medusa:PATH, mtp.",
    )
    max_drafts: int = setting(8, "Drafts that a step verifies of a sequence.", least=1, most=MAX_DRAFTS)
    speculation_mib: float = 64.0  # memory of a worker for past answers, which suffix drafts come from
    adapters: str = setting("", "LoRA adapters of every worker, as NAME=PATH, NAME=PATH.")
    max_adapters: int = setting(16, "LoRA adapters that a worker has at a time.", least=1)
    max_model_len: int | None = setting(
        None, "Longest prompt with its answer; default: the model's own.", unit="tokens", least=1
    )
    steps_in_flight: int | None = setting(
        None,
        "Steps launched ahead; each delays a stop by one; default: 1 on a GPU, 0 on a CPU.",
        least=0,
        most=MAX_STEPS_IN_FLIGHT,
    )
    cuda_graphs: bool = setting(True, "Capture decode steps on a GPU as CUDA graphs at the start.")
    bind_cores: str = setting("auto", "Compute threads on a CPU: auto (own cores for each rank), off, or as 0-3,8.")
    collective_timeout_s: float = 60.0  # a rank waits this long for another within a step
    lanes: LaneConfig = field(default_factory=LaneConfig)
    revision: str = ""

    def __post_init__(self) -> None:
        if not self.model:
            raise Misconfigured("no model is given: give a hub's name, a folder or a GGUF file", param="model")
        StepLimits.__post_init__(self)
        check_mode(self.speculate, "speculate")
        if len(parse_adapters(self.adapters)) > self.max_adapters:
            raise Misconfigured(
                f"max_adapters = {self.max_adapters}: raise it to the {len(parse_adapters(self.adapters))} adapters",
                param="adapters",
            )
        if self.bind_cores not in ("auto", "off") and not parse_cpus(self.bind_cores):
            raise Misconfigured(
                f"bind_cores = {self.bind_cores!r}: give auto, off, or CPUs as 0-3,8", param="bind_cores"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    headroom: float = 0.05  # share of the blocks that reservations leave to running answers
    retry_after_s: float = 0.5  # a refused reservation may be tried again after this time
    max_lease_s: float = 120.0  # longest lease of a ticket
    chunk_bytes: int = 32 * 2**20  # most bytes that one push copies before the engine's next step
    group_bytes: int = 2**20  # a prompt's last step pushes groups of layers of about this size


@dataclass(frozen=True, slots=True, kw_only=True)
class RankId:
    """The rank and the worker that a process belongs to. `incarnation` distinguishes a restarted worker from the one
    before it.

    `host` is the address by which other hosts reach this process. Rank 0 opens the ranks' rendezvous server on
    `store_port` of `store_host` (rank 0's host), for ranks that have the `store_key`; with one rank none of these is
    used. The ranks' collectives listen at `group_host`: the loopback where all ranks are on one host.
    """

    worker_id: str
    incarnation: int
    rank: int = 0
    size: int = 1
    host: str = LOOPBACK
    store_host: str = LOOPBACK
    store_port: int = 0
    store_key: bytes = field(default=b"", repr=False)
    group_host: str = LOOPBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(StepLimits):
    """Bounds of a step and of a sequence, for a certain model.

    `max_model_len` counts prompt and answer. `eos_ids` end an answer unless its request ignores them. A request of
    priority p goes before those of priority 0 that came up to `p * priority_head_start_s` seconds earlier, so that
    every request gets its turn.
    """

    max_model_len: int = field(metadata={"help": "", "least": 1})
    vocab_size: int = field(metadata={"help": "", "least": 1})
    eos_ids: tuple[int, ...] = ()
    priority_head_start_s: float = 30.0
