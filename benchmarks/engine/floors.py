"""What the machine could do at best: its memory's bandwidth and its matrix rate, measured, and what a workload needs.

A floor is a time that no engine on this machine can go below while it computes every product in bfloat16: prompts at
the matrix rate, decode steps at the rate of memory or of products, whichever is slower. Nothing else costs. Weights
count as many bytes as their encoding has. A prompt may be faster than its floor where products are of integers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from protos.values import ITEM_BYTES
from workers.models.model_config import ModelConfig, read_config, weight_bytes
from workers.weights.formats.float_matrix import FloatMatrix
from workers.weights.registry import stored_tensors
from workers.weights.source import FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """`bytes_per_s` read from memory, `flops_per_s` of bfloat16 products; the best seen with `num_threads`."""

    num_threads: int
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoad:
    """`num_requests` prompts of `input_len` tokens, given at once, each answered with `output_len`."""

    name: str
    num_requests: int
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Of a model: parameters in its layers' products, in the last one, bytes of both, and of a token's KV."""

    layer_params: int
    head_params: int
    weight_bytes: int
    kv_bytes: int
    flops_per_pair: int  # of attention: for one query and one key, all heads and layers

    @classmethod
    def of_files(cls, path: Path, dtype: str = "bfloat16") -> ModelCosts:
        """Of a folder or a GGUF file, with the bytes that its weights have there, or in `dtype` where they are floats.
        An embedding counts where the head is tied to it."""
        model = read_config(path)
        num_bytes = weight_bytes(path, dtype)
        if not model.tied_embeddings:
            embedding = stored_tensors(path)["model.embed_tokens.weight"]
            packed = embedding.dtype not in FLOATS
            num_bytes -= embedding.num_bytes if packed else math.prod(embedding.shape) * ITEM_BYTES[dtype]
        return replace(cls.of(model), weight_bytes=num_bytes)

    @classmethod
    def of(cls, model: ModelConfig) -> ModelCosts:
        """With all weights in bfloat16."""
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        hidden = model.hidden_size
        layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * model.intermediate_size
        params = layer * model.num_layers, model.vocab_size * hidden
        return cls(
            layer_params=params[0],
            head_params=params[1],
            weight_bytes=2 * sum(params),
            kv_bytes=2 * 2 * keys * model.num_layers,
            flops_per_pair=4 * queries * model.num_layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What one phase of a workload cannot do without: products, and bytes read from memory."""

    flops: float
    num_bytes: float

    def floor_s(self, machine: MachineRates) -> float:
        return max(self.flops / machine.flops_per_s, self.num_bytes / machine.bytes_per_s)


def needs(workload: TokenLoad, costs: ModelCosts, *, tokens_of_step: int = 2048) -> tuple[Needs, Needs]:
    """Of the prompts, computed in steps of `tokens_of_step`, and of the tokens after the first of each answer."""
    n, length = workload.num_requests, workload.input_len
    flops_of_token = 2 * (costs.layer_params + costs.head_params)
    pairs = length * (length + 1) // 2
    prefill = Needs(
        flops=n * (2 * costs.layer_params * length + 2 * costs.head_params + costs.flops_per_pair * pairs),
        num_bytes=-(-n * length // tokens_of_step) * costs.weight_bytes,
    )
    contexts = range(length + 1, length + workload.output_len)
    decode = Needs(
        flops=n * (len(contexts) * flops_of_token + costs.flops_per_pair * sum(contexts)),
        num_bytes=len(contexts) * costs.weight_bytes + n * costs.kv_bytes * sum(contexts),
    )
    return prefill, decode


@torch.inference_mode()
def measure(num_threads: int) -> MachineRates:
    """Of this process's threads. A few seconds. The best of several ways, and of several tries of each.

    A single thread is measured in its own time, so that what else the machine does does not count. The numbers are
    random, as a model's are: of equal ones a processor multiplies more in a second, since fewer bits change. The matrix
    rate is that of the product that the engine itself computes with, not what the instructions could do.
    """
    torch.set_num_threads(num_threads)
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    numbers = torch.ones(1 << 27)  # 512 MiB: no cache holds it
    read = numbers.numel() * 4 / _best(numbers.sum, 7, clock)
    weights = [FloatMatrix(torch.randn(6144, 1024).bfloat16()) for _ in range(24)]
    for matrix in weights:
        matrix.pack()
    one, some, many = (torch.randn(rows, 1024).bfloat16() for rows in (1, 256, 2048))

    def through_all() -> None:
        for matrix in weights:
            matrix(one)

    streamed = len(weights) * 6144 * 1024 * 2 / _best(through_all, 9, clock)
    products = {some: 30, many: 10}
    flops = max(2 * len(x) * 6144 * 1024 / _best(partial(weights[0], x), tries, clock) for x, tries in products.items())
    return MachineRates(num_threads=num_threads, bytes_per_s=max(read, streamed), flops_per_s=flops)


def best_of(machines: Sequence[MachineRates]) -> MachineRates:
    """Of several measurements of one machine, before, between and after what is compared with them."""
    return MachineRates(
        num_threads=machines[0].num_threads,
        bytes_per_s=max(machine.bytes_per_s for machine in machines),
        flops_per_s=max(machine.flops_per_s for machine in machines),
    )


def _best(work: Callable[[], object], tries: int, clock: Callable[[], float]) -> float:
    work()
    seconds = []
    for _ in range(tries):
        start = clock()
        work()
        seconds.append(clock() - start)
    return min(seconds)
