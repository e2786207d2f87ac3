"""What `gpu_kernels.py` measures: launches in the shapes of an 8B Llama, the bytes each must move, its operations.

`divisor` makes lengths, batches, vocabulary and layers smaller, for trying the cases where nothing is measured.
Legend: T tokens, N query heads, K key/value heads, D head dim, S rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from workers.kernels.block_copies import gather, scatter
from workers.kernels.device_kernels import KVScales
from workers.kernels.draw import Draws, draw
from workers.kernels.paged_decode import DecodePlan, decode_tile, paged_decode, plan_decode
from workers.kernels.prefill import PrefillPlan, plan_prefill, prefill, prefill_tile
from workers.kernels.rms_norm import add_rms_norm
from workers.kernels.rope_kv_write import rope_kv_write
from workers.kernels.silu_mul import gelu_tanh_mul, silu_mul
from workers.kernels.tile import Tile
from workers.kernels.vocab import embed, join

N, K, D, BLOCK_SIZE, HIDDEN, INTERMEDIATE, LAYERS = 32, 8, 128, 16, 4096, 14336, 32
VOCAB_SIZE = 128_256
GROUP = N // K

DECODES = {
    "batch 64, 8k": [8192] * 64,
    "batch 16, 8k": [8192] * 16,
    "batch 1, 32k": [32_768],
    "63 of 1k and one of 32k": [1024] * 63 + [32_768],
}
PREFILLS = {
    "one of 8k": [(8192, 0)],
    "16 of 512": [(512, 0)] * 16,
    "2k after 14k cached": [(2048, 14_336)],
    "16 tokens after 8k cached, 32 times": [(16, 8192)] * 32,
}
KV_KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
KV_SPEEDUP = 1.2  # of tokens that decode at 32k, over bfloat16
DECODE_TILES = [
    Tile(rows=16, positions=positions, warps=warps, stages=stages)
    for positions, warps, stages in ((64, 4, 2), (64, 4, 4), (64, 4, 5), (128, 4, 2), (128, 8, 3), (32, 2, 4))
]
PREFILL_TILES = [
    Tile(rows=rows, positions=positions, warps=warps, stages=stages, max_registers=max_registers)
    for rows, positions, warps, stages, max_registers in (
        (128, 64, 8, 2, None),
        (128, 64, 8, 2, 128),
        (128, 128, 8, 2, None),
        (128, 32, 8, 3, 128),
        (64, 64, 4, 2, None),
        (64, 64, 4, 3, None),
    )
]
FILTERS: list[dict[str, float]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 50, "top_p": 0.9}]
PEERS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """At least this share of the floor, or so many times the speed of another launch."""

    share: float = 0.0
    speedup: float = 0.0
    rival: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """`num_bytes` counts each input once and each output once, `num_flops` two a product."""

    kernel: str
    shape: str
    launch: Callable[[], object]
    num_bytes: int
    num_flops: int = 0
    tile: str = ""
    peers: Sequence[Callable[[], object]] = ()
    goal: Goal | None = None


def attention_cases(device: str, *, sweep: bool = False, divisor: int = 1) -> Iterator[KernelCase]:
    for shape, lens in DECODES.items():
        lens = [max(1, length // divisor) for length in lens[-max(1, len(lens) // divisor) :]]
        for tile in [decode_tile(D, GROUP, torch.bfloat16), *(DECODE_TILES if sweep else [])]:
            yield _decode(shape, lens, tile, device)
        for kind in KV_KINDS if divisor == 1 or "32k" in shape else ():
            yield _decode(shape, lens, decode_tile(D, GROUP, kind), device, kind)
    for shape, rows in PREFILLS.items():
        rows = [(max(1, new // divisor), cached // divisor) for new, cached in rows[: max(1, len(rows) // divisor)]]
        chosen = prefill_tile(D, GROUP, torch.bfloat16, max(new for new, _ in rows))
        for tile in [chosen, *(PREFILL_TILES if sweep else [])]:
            yield _prefill(shape, rows, tile, device)
        for kind in KV_KINDS if divisor == 1 or shape == "one of 8k" else ():
            tile = prefill_tile(D, GROUP, torch.bfloat16, max(new for new, _ in rows), rounded=True)
            yield _prefill(shape, rows, tile, device, kind)


class _Paged:
    """Random rows of (new tokens, context) over random pages; `kind` is the type of keys and values of 8 bits."""

    def __init__(self, rows: Sequence[tuple[int, int]], device: str, kind: torch.dtype | None = None) -> None:
        counts = [-(-context // BLOCK_SIZE) for _, context in rows]
        order = torch.randperm(sum(counts), dtype=torch.int32, device=device)
        tables = torch.split(order, counts)
        self.tables_SB = torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True)
        shape = 2, sum(counts), K, BLOCK_SIZE, D
        self.scales: KVScales | None = None
        if kind is None:
            caches = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        else:  # of bytes below 112: no NaN in e4m3
            caches = torch.randint(112, shape, dtype=torch.uint8, device=device).view(kind)
            scales = torch.full(shape[:4] if kind == torch.int8 else (2, K), 0.01, device=device)
            self.scales = scales[0], scales[1]
        self.k_cache, self.v_cache = caches[0], caches[1]
        self.starts = [0, *torch.tensor([new for new, _ in rows]).cumsum(0).tolist()]
        self.lens = [context for _, context in rows]
        self.q_TND = torch.randn(self.starts[-1], N, D, device=device).bfloat16()
        self.out_TND = torch.empty_like(self.q_TND)

    def num_bytes(self) -> int:
        head_bytes = D * self.k_cache.itemsize + (4 if self.k_cache.dtype == torch.int8 else 0)
        return 2 * sum(self.lens) * K * head_bytes + 2 * self.q_TND.nbytes


def _decode(shape: str, lens: Sequence[int], tile: Tile, device: str, kind: torch.dtype | None = None) -> KernelCase:
    """Of 8 bits: beside the same rows in bfloat16."""
    paged = _Paged([(1, length) for length in lens], device, kind)
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else 1
    arrays = plan_decode(
        range(len(lens)),
        paged.starts,
        lens,
        window=None,
        num_kv_heads=K,
        num_multiprocessors=num_multiprocessors,
    )
    items_W6, parts_R3 = (torch.from_numpy(array).to(device) for array in arrays)
    plan = DecodePlan(items_W6=items_W6, parts_R3=parts_R3)

    def launch() -> None:
        caches = paged.k_cache, paged.v_cache
        paged_decode(
            paged.q_TND, *caches, paged.out_TND, paged.tables_SB,
            plan=plan, scale=D**-0.5, window=None, scales=paged.scales, tile=tile,
        )  # fmt: skip

    flops = 4 * N * D * sum(lens)
    goal = None
    if kind is not None:
        rival = _decode(shape, lens, decode_tile(D, GROUP, torch.bfloat16), device).launch
        goal = Goal(speedup=KV_SPEEDUP if "32k" in shape else 0.0, rival=rival)
    return KernelCase(
        kernel=_kernel("paged_decode", kind),
        goal=goal,
        shape=shape,
        launch=launch,
        num_bytes=paged.num_bytes(),
        num_flops=flops,
        tile=_named(tile),
    )


def _kernel(name: str, kind: torch.dtype | None) -> str:
    return name if kind is None else f"{name}, {KV_KINDS[kind]} KV"


def _prefill(
    shape: str, rows: Sequence[tuple[int, int]], tile: Tile, device: str, kind: torch.dtype | None = None
) -> KernelCase:
    paged = _Paged([(new, new + cached) for new, cached in rows], device, kind)
    work_W4 = plan_prefill(range(len(rows)), paged.starts, paged.lens, group=GROUP, tile=tile)
    plan = PrefillPlan(work_W4=torch.from_numpy(work_W4).to(device), tile=tile)

    def launch() -> None:
        prefill(
            paged.q_TND, paged.k_cache, paged.v_cache, paged.out_TND, paged.tables_SB,
            plan=plan, scale=D**-0.5, window=None, scales=paged.scales,
        )  # fmt: skip

    pairs = sum(new * cached + new * (new + 1) // 2 for new, cached in rows)
    return KernelCase(
        kernel=_kernel("prefill", kind),
        shape=shape,
        launch=launch,
        num_bytes=paged.num_bytes(),
        num_flops=4 * N * D * pairs,
        tile=_named(tile),
        peers=_peers(rows, device) if kind is None else (),
    )


def _peers(rows: Sequence[tuple[int, int]], device: str) -> list[Callable[[], object]]:
    """torch's attention on equal rows in a batch, keys and values given side by side and for every query head."""
    (new, cached), *_ = rows
    q_SNTD = torch.randn(len(rows), N, new, D, device=device).bfloat16()
    k_SNCD, v_SNCD = (torch.randn(len(rows), N, new + cached, D, device=device).bfloat16() for _ in range(2))

    def peer(backend: SDPBackend) -> Callable[[], object]:
        def attend() -> object:
            with sdpa_kernel(backend):
                if cached:
                    mask = causal_lower_right(new, new + cached)
                    return F.scaled_dot_product_attention(q_SNTD, k_SNCD, v_SNCD, attn_mask=mask)
                return F.scaled_dot_product_attention(q_SNTD, k_SNCD, v_SNCD, is_causal=True)

        return attend

    return [peer(backend) for backend in PEERS]


def _named(tile: Tile) -> str:
    limit = "" if tile.max_registers is None else f", {tile.max_registers} registers"
    return f"{tile.rows} x {tile.positions}, {tile.warps} warps, {tile.stages} stages{limit}"


def other_cases(device: str, *, divisor: int = 1) -> Iterator[KernelCase]:
    for tokens in (8192 // divisor, 64 // min(divisor, 64)):
        shape = f"{tokens} tokens"
        x_TE, residual_TE = (torch.randn(tokens, HIDDEN, device=device).bfloat16() for _ in range(2))
        yield KernelCase(
            kernel="add_rms_norm",
            shape=shape,
            launch=lambda x=x_TE, y=residual_TE: add_rms_norm(x, y, x[0], 1e-5),  # type: ignore[misc]
            num_bytes=4 * x_TE.nbytes,
        )
        gate_up = torch.randn(tokens, 2 * INTERMEDIATE, device=device).bfloat16()
        for gate in (silu_mul, gelu_tanh_mul):
            yield KernelCase(
                kernel=gate.__name__,
                shape=shape,
                launch=lambda x=gate_up, gate=gate: gate(x),  # type: ignore[misc]
                num_bytes=gate_up.nbytes * 3 // 2,
            )
        yield _write(shape, tokens, device)
    rows, vocab_size = 64 // min(divisor, 64), VOCAB_SIZE // min(divisor, 32)
    yield from _vocab(rows, vocab_size, device)
    yield from (_draw(rows, vocab_size, filters, device) for filters in FILTERS)
    num_blocks, num_layers = max(2, 2048 // divisor), max(2, LAYERS // divisor)
    cache = torch.empty(num_layers, 2, num_blocks, K, BLOCK_SIZE, D, dtype=torch.bfloat16, device=device).normal_()
    ids = torch.randperm(num_blocks, device=device)[: num_blocks // 2]
    payload = gather(cache, ids)
    shape = f"{len(ids)} blocks, {num_layers} layers"
    yield KernelCase(kernel="gather", shape=shape, launch=lambda: gather(cache, ids), num_bytes=2 * payload.nbytes)
    yield KernelCase(
        kernel="scatter", shape=shape, launch=lambda: scatter(cache, ids, payload), num_bytes=2 * payload.nbytes
    )


def _vocab(rows: int, vocab_size: int, device: str, ranks: int = 2) -> Iterator[KernelCase]:
    """One rank's work of several; half of the ids are its own."""
    share = -(-vocab_size // ranks)
    table_SE = torch.randn(share, HIDDEN, device=device).bfloat16()
    ids_T = torch.randint(0, vocab_size, (rows,), device=device)
    num_bytes = (1 + ranks) * rows * HIDDEN * 2 // ranks
    yield KernelCase(
        kernel="embed", shape=f"{rows} tokens", launch=lambda: embed(ids_T, table_SE, 0), num_bytes=num_bytes
    )
    parts_PRS = torch.randn(ranks, rows, share, device=device).bfloat16()
    yield KernelCase(
        kernel="join",
        shape=f"{rows} rows of {ranks} ranks",
        launch=lambda: join(parts_PRS, vocab_size),
        num_bytes=parts_PRS.nbytes * 3,
    )


def _draw(rows: int, vocab_size: int, filters: dict[str, float], device: str) -> KernelCase:
    """The floor is that of one read of the logits, though a filter reads them many times."""
    logits_RV = torch.randn(rows, vocab_size, device=device) * 3
    params = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0} | filters
    draws = Draws.pack(
        temperatures=[params["temperature"]] * rows,
        min_ps=[params["min_p"]] * rows,
        top_ks=[int(params["top_k"])] * rows,
        top_ps=[params["top_p"]] * rows,
        seeds=list(range(rows)),
        indices=[0] * rows,
        vocab_size=vocab_size,
        device=device,
    )
    named = ", ".join(f"{name} {value:g}" for name, value in filters.items())
    return KernelCase(
        kernel="draw",
        shape=f"{rows} rows, {named}",
        launch=lambda: draw(logits_RV, draws),
        num_bytes=logits_RV.nbytes,
    )


def _write(shape: str, tokens: int, device: str) -> KernelCase:
    qkv = torch.randn(tokens, (N + 2 * K) * D, device=device).bfloat16()
    q_TND, k_TKD, v_TKD = (part.view(tokens, -1, D) for part in torch.split(qkv, [N * D, K * D, K * D], dim=1))
    cos_TP, sin_TP = (torch.randn(tokens, D // 2, device=device) for _ in range(2))
    num_blocks = -(-tokens // BLOCK_SIZE)
    caches = torch.empty(2, num_blocks, K, BLOCK_SIZE, D, dtype=torch.bfloat16, device=device)
    slots_T = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:tokens]
    return KernelCase(
        kernel="rope_kv_write",
        shape=shape,
        launch=lambda: rope_kv_write(q_TND, k_TKD, v_TKD, cos_TP, sin_TP, caches[0], caches[1], slots_T),
        num_bytes=2 * qkv.nbytes + 2 * cos_TP.nbytes + slots_T.nbytes,
    )
