"""A simulated deployment as one frozen value. What cannot work raises Misconfigured, naming the flag."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cluster.config import PoolsConfig, SupervisionConfig
from cluster.simulate.lanes import Cards
from cluster.simulate.latency import Latency, Roofline
from cluster.simulate.network import Wire
from cluster.simulate.shapes import gpu_of, model_of, num_blocks
from cluster.simulate.worker import Spec
from decode_pool.config import DecodeConfig
from prefill_pool.config import PrefillConfig
from protos.errors import Misconfigured
from protos.values import KVLayout
from router.config import RouterConfig
from workers.config import SchedulerConfig

VOCAB_SIZE = 32_768
TOY_LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, block_size=8, dtype="bfloat16")


def simulated_router(policy: str = "prefix_aware", **settings: float) -> RouterConfig:
    """A gateway's settings, with no checkpoint behind them: prompts come as token ids."""
    return RouterConfig(model_path=Path("simulated"), model_name="simulated", policy=policy, **settings)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """`num_gpus` of a worker; `load_s` from a worker's launch until it serves. `audit_every` events all invariants are
    looked at, 0: only at the end. A request that gets nothing for `patience_s` is stuck."""

    pools: PoolsConfig
    spec: Spec
    router: RouterConfig = field(default_factory=simulated_router)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    wire: Wire = field(default_factory=Wire)
    cards: Cards = field(default_factory=Cards)
    num_gateways: int = 1
    num_gpus: int = 1
    usd_per_gpu_hour: float = 0.0
    load_s: float = 5.0
    max_skew_s: float = 0.0
    audit_every: int = 0
    patience_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_gateways < 1:
            raise Misconfigured(f"--gateways {self.num_gateways}: give at least 1", param="gateways")


def hardware_spec(
    *,
    gpu: str,
    model: str,
    tp: int,
    block_size: int = 64,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    max_model_len: int | None = None,
    latency: Latency | None = None,
    leaping: bool = True,
) -> Spec:
    """Workers of `tp` GPUs each, with the KV cache that fits beside the weights. Raises Misconfigured."""
    card, shape = gpu_of(gpu), model_of(model)
    if tp < 1:
        raise Misconfigured(f"--tp {tp}: give at least 1", param="tp")
    layout = shape.layout(block_size)
    blocks = num_blocks(card, shape, tp=tp, block_size=block_size)
    return Spec(
        model=model,
        layout=layout,
        num_blocks=blocks,
        scheduler=SchedulerConfig(
            max_model_len=max_model_len or shape.max_len,
            vocab_size=VOCAB_SIZE,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            prefill_chunk=max_num_batched_tokens,
        ),
        latency=latency or Roofline(gpu=card, model=shape, tp=tp),
        prefill=PrefillConfig(chunk_bytes=256 * 2**20),
        decode=DecodeConfig(),
        leaping=leaping,
    )
