"""Keys and values in 8 bits on a CPU: what a decode step takes beside bfloat16, and what the demo model loses.

    python -m benchmarks.engine.cpu_kv                     the random Llama of 368M parameters, and the demo model
    python -m benchmarks.engine.cpu_kv --json figures.json

Steps of the types are timed by turns, in CPU time of one thread; the figures are medians. The loss is the divergence of
Kullback and Leibler of each next-token distribution from that with a cache in bfloat16, over the held-out texts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.engine.random_llama import CONFIG, write_checkpoint
from benchmarks.output import JsonFile, write_figures
from demo import held_out
from workers.attention.backend import AttentionInputs, GroupTables
from workers.attention.registry import attention_for
from workers.kv.kinds import with_kv_dtype
from workers.kv.kv_storage import KVStorage
from workers.models.decoder import Decoder, ModelInputs
from workers.models.loader import load_model
from workers.runner.fused_layers import fused_layers
from workers.worker_config import KVDtype

DEMO = Path(__file__).parents[2] / "demo" / "model"
KINDS: tuple[KVDtype, ...] = ("auto", "int8", "fp8")
CONTEXTS = (128, 8192)
BLOCK_SIZE, TURNS = 16, 15


class CachedModel:
    """A model with a cache for one sequence of up to `num_tokens`."""

    def __init__(self, model: Decoder, kv_dtype: KVDtype, num_tokens: int) -> None:
        layout = model.config.kv_layout(block_size=BLOCK_SIZE, dtype="bfloat16")
        self.storage = KVStorage(with_kv_dtype(layout, kv_dtype), num_blocks=-(-num_tokens // BLOCK_SIZE))
        self._model = model
        self._attention = attention_for(self.storage)
        self._through = fused_layers(model, self._attention, lambda layer: None)

    def fill(self) -> None:
        for tensor in self.storage.tensors:
            if tensor.dtype.is_floating_point:
                tensor.normal_().abs_().mul_(0.02)
            else:
                tensor.random_(0, 100)

    def logits(self, token_ids: list[int], start: int) -> torch.Tensor:
        """Of every token, [T, V], with those before `start` in the cache."""
        stop = start + len(token_ids)
        positions = torch.arange(start, stop)
        blocks = torch.arange(-(-stop // BLOCK_SIZE), dtype=torch.int32)
        inputs = AttentionInputs(
            positions_T=positions,
            query_starts=(0, len(token_ids)),
            context_lens=(stop,),
            tables=(GroupTables(slots_T=positions, block_tables_SB=blocks.unsqueeze(0)),),
            max_query=len(token_ids),
            max_context=stop,
        )
        self._attention.begin(inputs)
        return self._model.forward(
            ModelInputs(
                token_ids_T=torch.tensor(token_ids),
                attention=inputs,
                logit_rows=torch.arange(len(token_ids)),
                prompt_lens=(stop,),
            ),
            self._attention,
            self._through,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFigures:
    """`step_ms` by context length; `gain` of it over bfloat16; `block_share` of a block in bfloat16; `loss` in nats."""

    kv_dtype: str
    block_share: float
    step_ms: dict[int, float]
    gain: dict[int, float]
    loss: float


def timed(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def step_s(model: Decoder) -> dict[KVDtype, dict[int, float]]:
    """Medians of seconds of a step of one token behind each context."""
    torch.set_num_threads(1)
    caches = {kind: CachedModel(model, kind, max(CONTEXTS) + 1) for kind in KINDS}
    for cache in caches.values():
        cache.fill()
    found: dict[KVDtype, dict[int, float]] = {kind: {} for kind in KINDS}
    for context in CONTEXTS:
        taken: dict[KVDtype, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(TURNS + 2):
            for kind, cache in caches.items():
                seconds = timed(lambda cache=cache, context=context: cache.logits([5], context - 1))  # type: ignore[misc]
                if turn >= 2:
                    taken[kind].append(seconds)
        for kind in KINDS:
            found[kind][context] = statistics.median(taken[kind])
    return found


def loss(model: Decoder, texts: list[list[int]], kv_dtype: KVDtype) -> float:
    """Mean divergence from bfloat16, in nats a token."""
    total, count = 0.0, 0
    for token_ids in texts:
        plain, rounded = (
            CachedModel(model, kind, len(token_ids)).logits(token_ids, 0).double().log_softmax(-1)
            for kind in ("auto", kv_dtype)
        )
        total += float((plain.exp() * (plain - rounded)).sum())
        count += len(token_ids)
    return total / count


def measured() -> list[KVFigures]:
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), CONFIG | {"max_position_embeddings": 2 * max(CONTEXTS)})
        model = load_model(folder, dtype="bfloat16")
        model.pack()
    seconds = step_s(model)
    layout = model.config.kv_layout(block_size=BLOCK_SIZE, dtype="bfloat16")
    demo = load_model(DEMO, dtype="bfloat16")
    demo.pack()
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    sample = held_out.load(DEMO)
    texts = [tokenizer.encode(text, add_special_tokens=False).ids[:1024] for text in (*sample.source, *sample.chat)]
    return [
        KVFigures(
            kv_dtype=kind,
            block_share=with_kv_dtype(layout, kind).block_bytes / layout.block_bytes,
            step_ms={context: 1000 * seconds[kind][context] for context in CONTEXTS},
            gain={context: seconds["auto"][context] / seconds[kind][context] for context in CONTEXTS},
            loss=0.0 if kind == "auto" else loss(demo, texts, kind),
        )
        for kind in KINDS
    ]


def main(json_file: JsonFile = None) -> None:
    found = measured()
    table = Table("kv_dtype", "block", *(f"step at {context}" for context in CONTEXTS), "loss, nats a token")
    for one in found:
        steps = (f"{one.step_ms[context]:.1f} ms ({one.gain[context]:.2f} x)" for context in CONTEXTS)
        table.add_row(one.kv_dtype, f"{one.block_share:.3f}", *steps, f"{one.loss:.2e}")
    Console().print(table)
    write_figures(json_file, figures=[asdict(one) for one in found])


if __name__ == "__main__":
    typer.run(main)
