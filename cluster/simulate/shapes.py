"""What simulated hardware can do and what simulated models need: public figures, each with its source.

Rates are the makers' dense figures; what of them is reached is the latency model's business (`latency.Roofline`).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from protos.errors import Misconfigured
from protos.values import KVLayout
from workers.models.config import splits_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`flops` in the weights' precision (bf16; `fp8_flops` where a model's weights are fp8), bytes of memory and of
    memory bandwidth a second, bytes a second to the other GPUs of its host and to its host's memory (one way each).
    `usd_per_hour`: an example. A worker of more than the `HOST_GPUS` of one host talks over the network."""

    flops: float
    fp8_flops: float
    memory_bytes: float
    memory_rate: float
    link_rate: float
    host_rate: float
    usd_per_hour: float


HOST_GPUS = 8
NETWORK_RATE = 50e9  # a card of 400 Gb/s for each GPU


# Data sheets of NVIDIA's SXM modules; prices are round figures of the on-demand market, to be replaced by one's own.
GPUS: dict[str, Gpu] = {
    "a100": Gpu(
        flops=312e12,
        fp8_flops=312e12,
        memory_bytes=80e9,
        memory_rate=2.039e12,
        link_rate=300e9,
        host_rate=32e9,
        usd_per_hour=1.8,
    ),
    "h100": Gpu(
        flops=989e12,
        fp8_flops=1979e12,
        memory_bytes=80e9,
        memory_rate=3.35e12,
        link_rate=450e9,
        host_rate=64e9,
        usd_per_hour=2.8,
    ),
    "h200": Gpu(
        flops=989e12,
        fp8_flops=1979e12,
        memory_bytes=141e9,
        memory_rate=4.8e12,
        link_rate=450e9,
        host_rate=64e9,
        usd_per_hour=3.5,
    ),
    "b200": Gpu(
        flops=2250e12,
        fp8_flops=4500e12,
        memory_bytes=180e9,
        memory_rate=7.7e12,
        link_rate=900e9,
        host_rate=64e9,
        usd_per_hour=5.5,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Of `num` routed experts a token visits `num_active`; together they have `params`."""

    num: int
    num_active: int
    params: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`params` are all there are. `kv_heads` x `kv_width` numbers are cached as keys, as many as values, a layer and
    token. Attention computes over `heads` x `head_dim`. `weight_bytes`: of one parameter."""

    params: float
    layers: int
    hidden: int
    heads: int
    head_dim: int
    kv_heads: int
    kv_width: int
    max_len: int
    weight_bytes: float = 2.0
    experts: Experts | None = None

    @property
    def active_params(self) -> float:
        """That one token is multiplied with."""
        if self.experts is None:
            return self.params
        return self.params - self.experts.params * (1 - self.experts.num_active / self.experts.num)

    def touched_params(self, num_tokens: float) -> float:
        """That must be read for a step of so many tokens, each of which draws its experts at random."""
        experts = self.experts
        if experts is None:
            return self.params
        untouched = float((1 - experts.num_active / experts.num) ** num_tokens)
        return self.params - experts.params * untouched

    @property
    def kv_bytes(self) -> float:
        """Of one token, all layers."""
        return 2.0 * 2 * self.layers * self.kv_heads * self.kv_width

    def kept_bytes(self, tp: int) -> float:
        """Of one token on all of `tp` ranks. A head cannot be split: where there are more ranks than key/value heads,
        several keep the same one, and with MLA, which has one, all do."""
        return self.kv_bytes * max(1.0, tp / self.kv_heads)

    def splits(self, tp: int) -> bool:
        """Can so many ranks share its heads evenly?"""
        return splits_heads(self.heads, self.kv_heads, tp)

    def layout(self, block_size: int) -> KVLayout:
        """Of all ranks together: a simulated worker is one rank, however many GPUs its device stands for."""
        return KVLayout(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            head_dim=self.kv_width,
            block_size=block_size,
            dtype="bfloat16",
        )


# The checkpoints' config.json (Llama: 3.1). DeepSeek-V3 caches 512 + 64 numbers a token and layer (MLA): as one head of
# 2 x 288.
MODELS: dict[str, Model] = {
    "llama-3-8b": Model(
        params=8.03e9, layers=32, hidden=4096, heads=32, head_dim=128, kv_heads=8, kv_width=128, max_len=131_072
    ),
    "llama-3-70b": Model(
        params=70.6e9, layers=80, hidden=8192, heads=64, head_dim=128, kv_heads=8, kv_width=128, max_len=131_072
    ),
    "qwen3-32b": Model(
        params=32.8e9, layers=64, hidden=5120, heads=64, head_dim=128, kv_heads=8, kv_width=128, max_len=40_960
    ),
    "deepseek-v3": Model(
        params=671e9, layers=61, hidden=7168, heads=128, head_dim=192, kv_heads=1, kv_width=288, max_len=163_840,
        weight_bytes=1.0, experts=Experts(num=256, num_active=8, params=654e9),
    ),
}  # fmt: skip


def gpu_of(name: str) -> Gpu:
    """Raises Misconfigured for a GPU nobody described."""
    if name not in GPUS:
        raise Misconfigured(f"--gpu {shlex.quote(name)}: choose one of {', '.join(GPUS)}", param="gpu")
    return GPUS[name]


def model_of(name: str) -> Model:
    """Raises Misconfigured for a model nobody described."""
    if name not in MODELS:
        raise Misconfigured(f"--model {shlex.quote(name)}: choose one of {', '.join(MODELS)}", param="model")
    return MODELS[name]


def num_blocks(gpu: Gpu, model: Model, *, tp: int, block_size: int, memory_share: float = 0.9) -> int:
    """KV blocks that fit beside the weights, in `memory_share` of all GPUs of a worker. Raises Misconfigured."""
    weights = model.params * model.weight_bytes

    def fitting(tp: int, share: float) -> int:
        return int((gpu.memory_bytes * tp * share - weights) / (model.kept_bytes(tp) * block_size))

    if (num := fitting(tp, memory_share)) >= 1:
        return num
    larger = (one for one in range(tp + 1, model.heads + 1) if model.splits(one) and fitting(one, memory_share) >= 1)
    least = next(larger, None)
    fix = f"use {least} GPUs or more" if least is not None else "use GPUs with more memory"
    shares = (hundredths / 100 for hundredths in range(101))
    enough = next((share for share in shares if share > memory_share and fitting(tp, share) >= 1), None)
    if enough is None:
        raise Misconfigured(f"--tp {tp}: the weights alone need {weights / 1e9:.0f} GB: {fix}", param="tp")
    raise Misconfigured(
        f"worker.memory_fraction = {memory_share:g}: it leaves {gpu.memory_bytes * tp * memory_share / 1e9:.1f} GB of "
        f"--tp {tp}, and the weights alone need {weights / 1e9:.1f} GB: give {enough:g} or more, or {fix}",
        param="worker.memory_fraction",
    )
