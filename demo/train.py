"""Trains the demo model on the standard library: `python -m demo.train --out demo/model --minutes 45`.

The learning rate falls to zero at the end of the budget, which is a number of steps or of minutes, whichever ends
first. A usable model is exported after the first minutes and then regularly.
"""

import itertools
import os
import platform
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from demo import held_out, measure
from demo.corpus import Corpus, load_corpus
from demo.export import TrainingRun, write_card, write_folder
from demo.held_out import HeldOut
from demo.rows import Mixture, TrainingRows
from demo.vocabulary import VOCAB_SIZE, train_tokenizer

CONTEXT = 2048
NUM_RECITED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """How to train. `tokens_per_step` is exact for rows that divide it."""

    out: Path
    steps: int
    minutes: float
    seed: int
    device: torch.device
    threads: int
    compile: bool
    tokens_per_step: int = 4096
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup_steps: int = 30
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    first_export_s: float = 150.0
    export_every_s: float = 600.0


def build_model(device: torch.device) -> LlamaForCausalLM:
    """A randomly initialised model of 5.2 million parameters."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    with device:
        return LlamaForCausalLM(config)


def learning_rate(peak: float, step: int, warmup_steps: int, progress: float) -> float:
    """Linear warm-up over steps, then linear to zero over `progress` in [0, 1] (arXiv:2502.15938)."""
    return peak * min(1.0, (step + 1) / warmup_steps) * max(0.0, 1.0 - progress)


def build_optimizers(model: LlamaForCausalLM, plan: TrainingPlan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers (arXiv:2502.16982), AdamW for the embedding and the norms."""
    layers = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    inside = {id(parameter) for parameter in layers}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    return [
        torch.optim.Muon(layers, lr=plan.muon_lr, weight_decay=plan.weight_decay),
        torch.optim.AdamW(outside, lr=plan.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


class Training:
    """One training run: the model with its optimizers, fed by `TrainingRows`, exported into `plan.out`."""

    def __init__(self, plan: TrainingPlan, corpus: Corpus, console: Console, clock: Callable[[], float]) -> None:
        self._plan = plan
        self._corpus = corpus
        self._console = console
        self._clock = clock
        self._tokenizer: Tokenizer = train_tokenizer(
            [document.text for document in corpus.documents] + [entry.answer for entry in corpus.entries]
        )
        self._rows = TrainingRows(corpus, self._tokenizer, Mixture(), seed=plan.seed)
        self._sample: HeldOut = held_out.choose(corpus, seed=plan.seed)
        known = [entry for entry in corpus.entries if entry.well_known and entry.kind == "function"]
        self._to_recite = random.Random(plan.seed).sample(known, NUM_RECITED)
        self._model = build_model(plan.device)
        self._optimizers = build_optimizers(self._model, plan)
        self._peaks = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]
        self._step = 0
        self._tokens = 0

    def run(self) -> None:
        """Train until the budget is spent and leave the finished model in `plan.out`."""
        plan = self._plan
        loss_of = torch.compile(self._loss, dynamic=False) if plan.compile else self._loss
        started = self._clock()
        next_export = started + plan.first_export_s
        smooth: float | None = None
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console) as bar:
            task = bar.add_task("training", total=1.0)
            while (progress := self._progress(self._clock() - started)) < 1.0:
                loss = self._advance(loss_of, progress)
                smooth = loss if smooth is None else 0.97 * smooth + 0.03 * loss
                now = self._clock()
                speed = self._tokens / (now - started)
                state = f"step {self._step} loss {smooth:.3f} {speed:,.0f} tokens/s"
                bar.update(task, completed=progress, description=state)
                if self._step % 100 == 0:
                    bar.console.print(f"{state} after {now - started:.0f} s")
                if now >= next_export:
                    bar.console.print(self._export(now - started))
                    next_export = self._clock() + plan.export_every_s
            bar.update(task, completed=1.0)
        self._console.print(self._export(self._clock() - started))

    def _progress(self, elapsed_s: float) -> float:
        return max(self._step / self._plan.steps, elapsed_s / (60 * self._plan.minutes))

    def _loss(self, ids_BT: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self._plan.device.type, torch.bfloat16):
            logits_BTV = self._model(input_ids=ids_BT[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), ids_BT[:, 1:].flatten())

    def _advance(self, loss_of: Callable[[torch.Tensor], torch.Tensor], progress: float) -> float:
        ids_BT = self._rows.batch(self._plan.tokens_per_step).to(self._plan.device)
        loss = loss_of(ids_BT)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._plan.max_grad_norm)
        for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
            lr = learning_rate(peak, self._step, self._plan.warmup_steps, progress)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        self._step += 1
        self._tokens += ids_BT[:, 1:].numel()
        return loss.item()

    def _export(self, seconds: float) -> str:
        """Export the model, measure it, and print one line."""
        plan = self._plan
        write_folder(plan.out, self._model, self._tokenizer, self._sample)
        exported: torch.nn.Module = LlamaForCausalLM.from_pretrained(plan.out, dtype=torch.float32)
        exported.to(plan.device)

        def logits(ids_1T: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = exported(input_ids=ids_1T, use_cache=False).logits
            return result

        source = measure.loss_of(logits, self._tokenizer, self._sample.source, plan.device)
        chat = measure.loss_of(logits, self._tokenizer, self._sample.chat, plan.device)
        recited = measure.num_recited(logits, self._tokenizer, self._to_recite, plan.device)
        run = TrainingRun(
            steps=self._step,
            tokens_per_step=plan.tokens_per_step,
            tokens=self._tokens,
            seconds=seconds,
            cpu_seconds=time.process_time(),
            hardware=hardware_name(plan.device, plan.threads),
            command=f"python -m demo.train --out demo/model --steps {plan.steps} --minutes {plan.minutes:g}",
            seed=plan.seed,
            python=platform.python_version(),
            torch=torch.__version__,
            num_documents=len(self._corpus.documents),
            source_tokens=self._rows.num_source_tokens,
            num_entries=len(self._corpus.entries),
            well_known=sum(entry.well_known for entry in self._corpus.entries),
            source=source,
            chat=chat,
            asked=len(self._to_recite),
            recited=recited,
        )
        write_card(plan.out, self._model, run)
        return f"exported at step {self._step}: source {source.nats:.4f}, chat {chat.nats:.4f}, recited {recited}"


def hardware_name(device: torch.device, threads: int) -> str:
    """What a training ran on, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(itertools.chain(names, [platform.processor() or platform.machine()]))
    return f"{threads} cores of a shared {name} (CPU only)"


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile finds what it needs here: a C++ compiler for the CPU; CUDA builds bring theirs."""
    return device.type == "cuda" or shutil.which(os.environ.get("CXX", "g++")) is not None


def main(
    out: Annotated[Path, typer.Option(help="Folder to write the model into.")] = Path("demo/model"),
    minutes: Annotated[float, typer.Option(min=0.1, help="Budget of time; whichever is spent first ends it.")] = 45.0,
    steps: Annotated[int, typer.Option(min=1, help="Budget of steps of about 4,096 tokens.")] = 2400,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the data.")] = 2024,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
) -> None:
    """Train the demo model and write it as a Hugging Face folder."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    place = torch.device(device)
    plan = TrainingPlan(
        out=out, steps=steps, minutes=minutes, seed=seed, device=place, threads=threads, compile=can_compile(place)
    )
    disable_progress_bar()
    console = Console()
    console.print("reading the standard library")
    Training(plan, load_corpus(), console, time.monotonic).run()


if __name__ == "__main__":
    typer.run(main)
