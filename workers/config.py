"""Settings of a worker's parts. Frozen; a value nobody could serve with raises Misconfigured where it is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvtransfer.config import LaneConfig
from protos.errors import Misconfigured
from workers.cores import parse_cpus

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float32"]
MAX_STEPS_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What a worker serves, with what, and how much of the machine it takes.

    `model` is a checkpoint folder, `served_name` what clients call it (default: the folder's name). `max_model_len`
    counts prompt and answer (default: what the model was made for). The KV cache has `num_blocks` blocks of
    `block_size` tokens; by default as many as fit into `memory_fraction`: of a GPU's memory, model and activations
    included (default 0.9), or of the RAM free at the start, the cache alone (default 0.2: workers share a host).
    What it evicts is kept in `host_kv_gib` GiB of host memory, over all ranks, and loaded when it is hit, if that is
    quicker than computing (default 0: nothing; on a CPU both are the same memory, and a larger cache serves better).
    Beyond `max_waiting` requests that have not begun, new ones are refused (Overloaded). When more than `max_num_seqs`
    sequences have begun they take turns of `turn_s`: one that gives up its seat keeps its KV.
    `steps_in_flight` are launched before the oldest one is told of (default 1 on a GPU, 0 on a CPU).
    On a GPU, decode steps are captured as CUDA graphs at the start unless `cuda_graphs` is off.
    On a CPU, a rank's compute threads are bound to cores that no other rank has, of one memory node, where there are
    enough (`bind_cores` "auto"), nowhere ("off"), or to the CPUs of a list ("0-3,8").
    `collective_timeout_s` bounds how long a rank waits for another in the middle of a step. `lanes` are those that KV
    comes and goes by.
    """

    model: str
    served_name: str = ""
    device: Device = "auto"
    dtype: Dtype = "auto"
    tp: int = 1
    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float | None = None
    host_kv_gib: float = 0.0
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    prefill_chunk: int = 512
    max_waiting: int = 1024
    turn_s: float = 10.0
    steps_in_flight: int | None = None
    cuda_graphs: bool = True
    bind_cores: str = "auto"
    collective_timeout_s: float = 60.0
    lanes: LaneConfig = field(default_factory=LaneConfig)

    def __post_init__(self) -> None:
        if not self.model:
            raise Misconfigured(
                "no model is given: name a Hugging Face checkpoint folder (--model, or model = in the file)",
                param="model",
            )
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _one_of("dtype", self.dtype, ("auto", "bfloat16", "float32"))
        counts = ("tp", "block_size", "num_blocks", "max_model_len")
        for name in (*counts, "max_num_batched_tokens", "max_num_seqs", "prefill_chunk", "max_waiting"):
            _at_least_1(name, getattr(self, name))
        _seats_fit(self.max_num_seqs, self.max_num_batched_tokens)
        _above_0("turn_s", self.turn_s)
        if self.steps_in_flight is not None and not 0 <= self.steps_in_flight <= MAX_STEPS_IN_FLIGHT:
            raise Misconfigured(
                f"steps_in_flight is {self.steps_in_flight}: it must be 0 to {MAX_STEPS_IN_FLIGHT}; each delays the "
                f"notice of a stop by a step",
                param="steps_in_flight",
            )
        if self.memory_fraction is not None and not 0.0 < self.memory_fraction <= 1.0:
            raise Misconfigured(
                f"memory_fraction is {self.memory_fraction}: it must be above 0 and at most 1", param="memory_fraction"
            )
        if not 0.0 <= self.host_kv_gib < float("inf"):
            raise Misconfigured(
                f"host_kv_gib is {self.host_kv_gib}: give 0 (no blocks on the host) or a number of GiB",
                param="host_kv_gib",
            )
        if self.bind_cores not in ("auto", "off") and not parse_cpus(self.bind_cores):
            raise Misconfigured(
                f"bind_cores is {self.bind_cores!r}: choose auto, off, or a list of CPUs as 0-3,8", param="bind_cores"
            )
        _above_0("collective_timeout_s", self.collective_timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Which rank of which worker a process is. `incarnation` tells a restarted worker from the one before it.

    `host` is what other hosts reach this process by. Rank 0 opens the ranks' meeting place on `store_port` of
    `store_host` (rank 0's host), which serves ranks that have the `store_key`; with one rank none of these is used.
    All ranks of a worker are on one host.
    """

    worker_id: str
    incarnation: int
    rank: int = 0
    size: int = 1
    host: str = "127.0.0.1"
    store_host: str = "127.0.0.1"
    store_port: int = 0
    store_key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What bounds a step and a sequence.

    `max_num_batched_tokens` is the budget of one step, of which a single prompt takes at most `prefill_chunk`.
    `max_waiting` requests at most wait to begin; `max_model_len` counts prompt and answer. `eos_ids` end an answer
    unless its request ignores them. A request of priority p goes before those of priority 0 that came up to
    `p * priority_head_start_s` seconds earlier: so the urgent go first and nobody waits for ever. Sequences that have
    begun take turns of `turn_s` where there are more than `max_num_seqs`.
    """

    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    prefill_chunk: int = 512
    max_waiting: int = 1024
    turn_s: float = 10.0
    priority_head_start_s: float = 30.0

    def __post_init__(self) -> None:
        counts = ("max_model_len", "vocab_size", "max_num_batched_tokens", "max_num_seqs", "prefill_chunk")
        for name in (*counts, "max_waiting"):
            _at_least_1(name, getattr(self, name))
        _seats_fit(self.max_num_seqs, self.max_num_batched_tokens)
        _above_0("turn_s", self.turn_s)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise Misconfigured(f"{name} is {value!r}: choose one of {', '.join(allowed)}", param=name)


def _at_least_1(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise Misconfigured(f"{name} is {value}: it must be at least 1", param=name)


def _above_0(name: str, value: float) -> None:
    if not value > 0:
        raise Misconfigured(f"{name} is {value}: it must be above 0", param=name)


def _seats_fit(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    if max_num_seqs > max_num_batched_tokens:
        raise Misconfigured(
            f"max_num_seqs is {max_num_seqs}, more than max_num_batched_tokens = {max_num_batched_tokens}: "
            f"every running sequence needs one token of each step, so raise the latter or lower the former",
            param="max_num_seqs",
        )
