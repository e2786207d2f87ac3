"""GPUs and models from `gpus.toml` and `models.toml`. Rates are the makers' dense figures."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from protos.errors import Misconfigured
from protos.hints import counted
from protos.values import KVLayout
from workers.kv.groups import with_windows
from workers.kv.kinds import refuse_latents, with_kv_dtype
from workers.models.families.latent_config import LatentConfig
from workers.models.model_config import splits_heads
from workers.worker_config import KVDtype

HOST_GPUS = 8
BFLOAT16, FP8, FP8_BLOCK, INT8, INT4, MXFP4 = "bfloat16", "fp8", "fp8_block", "int8", "int4", "mxfp4"
DTYPES = (BFLOAT16, FP8, FP8_BLOCK, INT8, INT4, MXFP4)
"""`fp8` has one scale per tensor, `fp8_block` one per 128 x 128 as in DeepSeek-V3. Integers (a scale per 128 inputs)
and MXFP4 (per 32) are multiplied in bfloat16."""

SHORT_NAMES = {"bf16": BFLOAT16}

WEIGHT_BYTES = {BFLOAT16: 2.0, FP8: 1.0, FP8_BLOCK: 1.0, INT8: 1 + 2 / 128, INT4: 0.5 + 2 / 128, MXFP4: 0.5 + 1 / 32}
COMPUTED_IN = {dtype: BFLOAT16 if dtype in (INT8, INT4, MXFP4) else dtype for dtype in DTYPES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A worker with more GPUs than the `HOST_GPUS` of a host reduces over one network card per GPU."""

    flops: float  # per second, dense, bfloat16
    fp8_flops: float | None  # per second, dense; None: no FP8 tensor cores
    memory_bytes: float
    memory_rate: float  # bytes per second
    link_rate: float  # bytes per second to the other GPUs of its host, one way
    network_rate: float  # bytes per second of its network card, one way
    host_rate: float  # bytes per second to its host's memory, one way
    usd_per_hour: float  # an example price
    like: str  # the GPU whose fitted shares apply (`fitted.json`)


GPU_KEYS = {
    "tflops": ("flops", 1e12),
    "fp8_tflops": ("fp8_flops", 1e12),
    "memory_gb": ("memory_bytes", 1e9),
    "memory_gb_per_s": ("memory_rate", 1e9),
    "link_gb_per_s": ("link_rate", 1e9),
    "network_gbit_per_s": ("network_rate", 1e9 / 8),
    "host_gb_per_s": ("host_rate", 1e9),
    "usd_per_hour": ("usd_per_hour", 1.0),
}
"""Key of a GPU's file -> field of `Gpu` and unit."""


def gpu_figures(described: Mapping[str, float]) -> dict[str, Any]:
    figures = {GPU_KEYS[key][0]: value * GPU_KEYS[key][1] for key, value in described.items()}
    return figures | {name: value or None for name, value in figures.items() if name == "fp8_flops"}


def _described(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


GPUS = {name: Gpu(like=name, **gpu_figures(described)) for name, described in _described("gpus.toml").items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Experts of a layer: a token visits `num_active` of `num` routed ones and all `num_shared`, in widths of a routed
    one."""

    num: int
    num_active: int
    width: int  # of an expert's hidden layer
    num_shared: float = 0
    num_dense_layers: int = 0

    def touched(self, num_tokens: float) -> float:
        """The expected number of a layer's routed experts that `num_tokens` tokens visit at random."""
        return self.num * (1 - float((1 - self.num_active / self.num) ** num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """`kv_heads` x `kv_width` numbers are cached per layer and token as keys, and as many as values. A worker's GPUs
    share each routed expert's columns, or, with `whole_experts`, the experts. `windows` are those of the layers, in
    turns; 0: none."""

    params: float
    layers: int
    hidden: int
    heads: int
    head_dim: int
    kv_heads: int
    kv_width: int
    width: int  # of the hidden layer of a dense layer's MLP
    vocab: int
    max_len: int
    dtype: str = BFLOAT16  # the weights' type: one of `DTYPES`
    expert_dtype: str | None = None  # of routed experts, if theirs is another
    experts: Experts | None = None
    latent: LatentConfig | None = None
    windows: tuple[int, ...] = ()
    whole_experts: bool = False
    kv_dtype: KVDtype = "auto"
    free_windows: bool = True

    @property
    def expert_bytes(self) -> float:
        """Bytes per parameter of routed experts."""
        return WEIGHT_BYTES[self.expert_dtype or self.dtype]

    @property
    def experts_computed_in(self) -> str:
        return COMPUTED_IN[self.expert_dtype or self.dtype]

    @property
    def computed_in(self) -> str:
        return COMPUTED_IN[self.dtype]

    @property
    def window_shares(self) -> tuple[tuple[int | None, float], ...]:
        """Each window with its share of the layers; empty if no layer has one."""
        kinds = Counter(self._layer_windows())
        return tuple((window, num / self.layers) for window, num in kinds.items()) if any(kinds) else ()

    def _layer_windows(self) -> list[int | None]:
        turns = self.windows or (0,)
        return [turns[layer % len(turns)] or None for layer in range(self.layers)]

    @property
    def expert_params(self) -> float:
        if (experts := self.experts) is None:
            return 0.0
        return 3.0 * experts.num * experts.width * self.hidden * (self.layers - experts.num_dense_layers)

    @property
    def kv_bytes(self) -> float:
        """Bytes per token, in all layers."""
        return float(self.layout(1).block_bytes)

    def kept_bytes(self, tp: int) -> float:
        """Bytes of KV per token on all `tp` ranks. Ranks beyond the key/value heads repeat a head."""
        return self.kv_bytes * max(1.0, tp / self.kv_heads)

    def stored_bytes(self, tp: int, block_size: int) -> float:
        """Bytes of a block on all `tp` ranks, including the empty room of smaller groups of layers."""
        layout = self.layout(block_size)
        return self.kept_bytes(tp) * block_size * layout.stored_bytes / layout.block_bytes

    def held_bytes(self, tp: int) -> float:
        """Bytes of weights on all `tp` GPUs, as if each had as many as the fullest one."""
        others = self.params - self.expert_params
        uneven = 1.0
        if self.experts is not None and self.whole_experts:
            uneven = math.ceil(self.experts.num / tp) * tp / self.experts.num
        return others * WEIGHT_BYTES[self.dtype] + self.expert_params * uneven * self.expert_bytes

    def splits(self, tp: int) -> bool:
        return splits_heads(self.heads, self.kv_heads, tp)

    def layout(self, block_size: int) -> KVLayout:
        """The KV layout of all ranks together: a simulated worker is one rank. Raises UnsupportedModel for latents in 8
        bits."""
        if self.latent is not None:
            refuse_latents(self.kv_dtype)
            width = self.latent.width
            return KVLayout.latent(num_layers=self.layers, width=width, block_size=block_size, dtype="bfloat16")
        layout = KVLayout.dense(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            head_dim=self.kv_width,
            block_size=block_size,
            dtype="bfloat16",
        )
        layout = with_kv_dtype(layout, self.kv_dtype)
        return with_windows(layout, self._layer_windows()) if self.free_windows else layout


MODELS = msgspec.convert(_described("models.toml"), dict[str, ModelShape])


def num_blocks(gpu: Gpu, model: ModelShape, *, tp: int, block_size: int, memory_share: float = 0.9) -> int:
    """KV blocks that fit beside the weights in `memory_share` of a worker's GPUs. Raises Misconfigured."""
    weights = model.held_bytes(tp)

    def fitting(tp: int, share: float) -> int:
        return int((gpu.memory_bytes * tp * share - model.held_bytes(tp)) / model.stored_bytes(tp, block_size))

    if (num := fitting(tp, memory_share)) >= 1:
        return num
    larger = filter(model.splits, range(tp + 1, model.heads + 1))
    least = next((num_gpus for num_gpus in larger if fitting(num_gpus, memory_share) >= 1), None)
    fix = f"use {least} GPUs or more (cluster.tp = {least})" if least is not None else "use GPUs with more memory"
    enough = math.ceil(100 * (weights + model.stored_bytes(tp, block_size)) / (gpu.memory_bytes * tp)) / 100
    if enough > 1:
        needed = f"the weights alone need {weights / 1e9:.0f} GB"
        raise Misconfigured(f"cluster.tp = {tp}: {needed}: {fix}", param="cluster.tp")
    raise Misconfigured(
        f"worker.memory_fraction = {memory_share:g}: it leaves {gpu.memory_bytes * tp * memory_share / 1e9:.1f} GB of "
        f"{counted(tp, 'GPU')}, and the weights alone need {weights / 1e9:.1f} GB: give {enough:g} or more, or {fix}",
        param="worker.memory_fraction",
    )
