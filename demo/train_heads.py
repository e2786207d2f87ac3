"""Trains heads that draft for the demo model: `python -m demo.train_heads`.

The demo model answers questions about names of the training half, and the heads learn its distribution on these answers
and on source code. An EAGLE-3 head is written to `demo/eagle3`, Medusa heads to `demo/medusa`, in the formats in which
such heads are published. How often their drafts are accepted: `python -m benchmarks.speculation.heads`.
"""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from demo.corpus import Corpus, load_corpus
from demo.draft_heads import TrainedEagle3, TrainedMedusa, distillation_loss
from demo.export import replace, replace_json
from demo.rows import Mixture, TrainingRows, ask
from demo.train import hardware_name, learning_rate
from demo.vocabulary import END, END_OF_TEXT, open_dialogue

TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
STEP_WEIGHT = 0.8
"""What a later step's loss counts, of that before it."""

CARD = """\
---
license: apache-2.0
tags: [{tag}, speculative-decoding, demo]
---
# {title} for Baton's demo model

Drafts tokens for [the demo model](../model/README.md): `baton serve --model demo/model --speculate {mode}`. The answers
stay, token for token, those without it. Acceptance by position: `docs/speculation.md`.

| | |
|---|---|
| Parameters | {num_parameters:,} |
| Form | {form} |
| Weights | bfloat16, {weight_mb:.1f} MB |
| Trained on | {answered:,} tokens of the demo model's own answers, and source code: {tokens:,} tokens in all |
| Steps | {steps:,} of about {tokens_per_step:,} tokens, for both kinds of heads together |
| Training time | {seconds:,.0f} s, in which it got {cpu_seconds:,.0f} CPU seconds |
| Hardware | {hardware} |
| Command | `{command}` |
| Versions | Python {python}, torch {torch} |

Questions and sources are the training half of the demo model's own data; held-out names were not asked for.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlan:
    """How to train. A row has `row_tokens`, a step `tokens_per_step`."""

    model: Path
    out: Path
    minutes: float
    steps: int
    seed: int
    num_answers: int
    threads: int
    row_tokens: int = 256
    tokens_per_step: int = 2048
    num_drafts: int = 4
    num_medusa: int = 3
    draft_vocab: int = 2048
    inner_size: int = 512
    aux_layers: tuple[int, ...] = (2, 4, 6)
    answer_share: float = 0.75
    muon_lr: float = 0.02
    adam_lr: float = 2e-3
    warmup_steps: int = 30


@torch.no_grad()
def answered(model: LlamaForCausalLM, tokenizer: Tokenizer, questions: Sequence[str], temperature: float) -> list[int]:
    """The questions with the model's answers, one dialogue after the other."""
    prompts = [tokenizer.encode(open_dialogue(question), add_special_tokens=False).ids for question in questions]
    longest, pad, end = max(map(len, prompts)), *(tokenizer.encode(one).ids[-1] for one in (END_OF_TEXT, END))
    ids_BL = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts])
    mask_BL = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    sampling = {"do_sample": True, "temperature": temperature, "top_p": 1.0} if temperature else {"do_sample": False}
    out_BL = model.generate(ids_BL, attention_mask=mask_BL, max_new_tokens=192, eos_token_id=end, **sampling)
    stream: list[int] = []
    for prompt, new in zip(prompts, out_BL[:, longest:].tolist(), strict=True):
        stop = new.index(end) if end in new else len(new)
        stream += [*prompt, *new[:stop], end, pad]
    return stream


def answers(
    model: LlamaForCausalLM, tokenizer: Tokenizer, corpus: Corpus, plan: HeadPlan, console: Console
) -> list[int]:
    """Dialogues about names of the training half, at several temperatures."""
    chance = random.Random(plan.seed)
    famous = [entry for entry in corpus.entries if entry.well_known]
    stream: list[int] = []
    for number in range(0, plan.num_answers, 64):
        entries = [chance.choice(famous if chance.random() < 0.4 else corpus.entries) for _ in range(64)]
        temperature = TEMPERATURES[number // 64 % len(TEMPERATURES)]
        stream += answered(model, tokenizer, [ask(entry, chance) for entry in entries], temperature)
        if number % 1024 == 0:
            console.print(f"{number + 64} of {plan.num_answers} questions answered: {len(stream):,} tokens")
    return stream


def frequent_ids(stream: Sequence[int], sources: Sequence[int], count: int, vocab_size: int) -> torch.Tensor:
    """The ids of the most frequent tokens, ascending."""
    counts_V = torch.bincount(torch.tensor(stream), minlength=vocab_size).double() / len(stream)
    counts_V += 0.5 * torch.bincount(torch.tensor(sources), minlength=vocab_size).double() / len(sources)
    return counts_V.topk(count).indices.sort().values


def batches(stream: Sequence[int], rows: TrainingRows, plan: HeadPlan) -> Iterator[torch.Tensor]:
    """[B, L] ids, without end: runs of answers, and of source code."""
    chance, length = random.Random(plan.seed + 1), plan.row_tokens
    while True:
        num_rows = plan.tokens_per_step // length
        num_answers = sum(chance.random() < plan.answer_share for _ in range(num_rows))
        starts = [chance.randrange(len(stream) - length) for _ in range(num_answers)]
        made = [torch.tensor([stream[start : start + length]]) for start in starts]
        if num_answers < num_rows:
            made.append(rows.batch((num_rows - num_answers) * length)[: num_rows - num_answers, :length])
        yield torch.cat(made)


class HeadTraining:
    """Both kinds of heads, trained on the same steps of the target."""

    def __init__(self, model: LlamaForCausalLM, draft_ids_V: torch.Tensor, plan: HeadPlan) -> None:
        self._model, self._plan = model, plan
        embedding_VE = model.get_input_embeddings().weight.detach()
        self.eagle = TrainedEagle3(model.config, plan.aux_layers, draft_ids_V, inner_size=plan.inner_size)
        self.medusa = TrainedMedusa(model.config, plan.num_medusa)
        with torch.no_grad():
            self.eagle.lm_head.weight.copy_(embedding_VE[draft_ids_V])
            for block, head in zip(self.medusa.blocks, self.medusa.heads, strict=True):
                nn.init.zeros_(block.weight)  # type: ignore[arg-type]
                nn.init.zeros_(block.bias)  # type: ignore[arg-type]
                head.weight.copy_(embedding_VE)  # type: ignore[operator]
        self._optimizers = self._made_optimizers()
        self._peaks = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]
        self.num_steps = 0

    def step(self, ids_BL: torch.Tensor, progress: float) -> tuple[list[float], list[float]]:
        """The share of positions at which each EAGLE-3 step, and each Medusa head, has the target's first choice."""
        with torch.no_grad():
            out = self._model(ids_BL, output_hidden_states=True, use_cache=False)
        states, target_BLV = out.hidden_states, out.logits
        eagle_loss, eagle_right = self._eagle_loss(states, target_BLV, ids_BL)
        medusa_loss, medusa_right = self._medusa_loss(states[-1], target_BLV)
        torch.autograd.backward(eagle_loss + medusa_loss)
        for module in (self.eagle, self.medusa):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
            optimizer.param_groups[0]["lr"] = learning_rate(peak, self.num_steps, self._plan.warmup_steps, progress)
            optimizer.step()
            optimizer.zero_grad()
        self.num_steps += 1
        return eagle_right, medusa_right

    def _eagle_loss(
        self, states: Sequence[torch.Tensor], target_BLV: torch.Tensor, ids_BL: torch.Tensor
    ) -> tuple[torch.Tensor, list[float]]:
        num_steps = self._plan.num_drafts
        embedded_BLE = self._model.get_input_embeddings()(ids_BL).detach()
        loss, right = torch.zeros(()), []
        for step, logits_BTV in enumerate(self.eagle.unroll(states, embedded_BLE, num_steps)):
            num_bases = logits_BTV.shape[1]
            wanted_BTV = target_BLV[:, step + 1 : step + 1 + num_bases]
            loss = loss + STEP_WEIGHT**step * distillation_loss(logits_BTV, wanted_BTV[..., self.eagle.draft_ids_V])
            chosen = self.eagle.draft_ids_V[logits_BTV.argmax(-1)]
            right.append((chosen == wanted_BTV.argmax(-1)).float().mean().item())
        return loss, right

    def _medusa_loss(self, last_BLE: torch.Tensor, target_BLV: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        num_heads = self._plan.num_medusa
        num_bases = last_BLE.shape[1] - num_heads
        loss, right = torch.zeros(()), []
        for head, logits_BTV in enumerate(self.medusa(last_BLE[:, :num_bases])):
            wanted_BTV = target_BLV[:, head + 1 : head + 1 + num_bases]
            loss = loss + STEP_WEIGHT**head * distillation_loss(logits_BTV, wanted_BTV)
            right.append((logits_BTV.argmax(-1) == wanted_BTV.argmax(-1)).float().mean().item())
        return loss, right

    def _made_optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices inside, AdamW for heads over tokens, norms and biases, as for the demo model."""
        outside = [self.eagle.lm_head, *self.medusa.heads]
        tops = {id(head.weight) for head in outside}
        every = [*self.eagle.parameters(), *self.medusa.parameters()]
        inside = [one for one in every if one.ndim == 2 and id(one) not in tops]
        others = [one for one in every if one.ndim != 2 or id(one) in tops]
        return [
            torch.optim.Muon(inside, lr=self._plan.muon_lr, weight_decay=0.05),
            torch.optim.AdamW(others, lr=self._plan.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]


def export(training: HeadTraining, plan: HeadPlan, num_answered: int, seconds: float) -> None:
    """Writes both folders, each with its card."""
    eagle, medusa = training.eagle, training.medusa
    forms = (
        ("eagle3", "eagle", "An EAGLE-3 head", eagle,
         f"one layer over layers {', '.join(map(str, plan.aux_layers))}, {len(eagle.draft_ids_V):,} tokens of its own"),
        ("medusa", "medusa", "Medusa heads", medusa, f"{plan.num_medusa} heads of one block each"),
    )  # fmt: skip
    for name, kind, title, module, form in forms:
        folder = plan.out / name
        folder.mkdir(parents=True, exist_ok=True)
        weights = save(module.tensors(), metadata={"format": "pt"})
        replace(folder / "model.safetensors", weights)
        replace_json(folder / "config.json", module.published_config())
        card = CARD.format(
            tag=name,
            title=title,
            mode=f"{kind}:demo/{name}",
            num_parameters=sum(parameter.numel() for parameter in module.parameters()),
            form=form,
            weight_mb=len(weights) / 1e6,
            answered=num_answered,
            tokens=training.num_steps * plan.tokens_per_step,
            steps=training.num_steps,
            tokens_per_step=plan.tokens_per_step,
            seconds=seconds,
            cpu_seconds=time.process_time(),
            hardware=hardware_name(torch.device("cpu"), plan.threads),
            command=f"python -m demo.train_heads --minutes {plan.minutes:g} --answers {plan.num_answers}",
            python=platform.python_version(),
            torch=torch.__version__,
        )
        replace(folder / "README.md", card.encode())


def train(plan: HeadPlan, corpus: Corpus, console: Console) -> None:
    start_s = time.monotonic()
    model = LlamaForCausalLM.from_pretrained(plan.model, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(plan.model / "tokenizer.json"))
    rows = TrainingRows(corpus, tokenizer, Mixture(chat=0.0, lengths=((plan.row_tokens, 1.0),)), seed=plan.seed)
    stream = answers(model, tokenizer, corpus, plan, console)
    sources = [token for _ in range(16) for token in rows.batch(plan.tokens_per_step).flatten().tolist()]
    training = HeadTraining(model, frequent_ids(stream, sources, plan.draft_vocab, model.config.vocab_size), plan)
    begun_s = time.monotonic()
    for ids_BL in batches(stream, rows, plan):
        elapsed_s = time.monotonic() - begun_s
        progress = max(training.num_steps / plan.steps, elapsed_s / (60 * plan.minutes))
        if progress >= 1.0:
            break
        right = training.step(ids_BL, progress)
        if training.num_steps % 50 == 1:
            shares = ["/".join(f"{share:.2f}" for share in one) for one in right]
            console.print(f"step {training.num_steps} after {elapsed_s:.0f} s: EAGLE-3 {shares[0]}, Medusa {shares[1]}")
    export(training, plan, len(stream), time.monotonic() - start_s)


def main(
    model: Annotated[Path, typer.Option(help="The demo model.")] = Path("demo/model"),
    out: Annotated[Path, typer.Option(help="Folder of the folders eagle3 and medusa.")] = Path("demo"),
    minutes: Annotated[float, typer.Option(min=0.01, help="Time to train, after the questions are answered.")] = 12.0,
    steps: Annotated[int, typer.Option(min=1, help="Steps at most.")] = 4000,
    answer: Annotated[int, typer.Option("--answers", min=64, help="Questions that the model answers first.")] = 3072,
    seed: Annotated[int, typer.Option(help="Of the weights and of the data.")] = 2025,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
) -> None:
    """Train heads that draft for the demo model."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    disable_progress_bar()
    plan = HeadPlan(model=model, out=out, minutes=minutes, steps=steps, seed=seed, num_answers=answer, threads=threads)
    train(plan, load_corpus(), Console())


if __name__ == "__main__":
    typer.run(main)
