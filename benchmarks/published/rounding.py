"""What Baton's default rounding and 8-bit KV cost a published model, beside llama.cpp on the same file.

    python -m benchmarks.published.rounding FILE.gguf --llama-python ENV/bin/python

The reference is transformers in float32 with the dequantised file: its greedy answers to the first 20 questions of
questions.json, 48 tokens each. Every engine computes the log-probabilities of these tokens, one step a token. The
perplexity is of the decision records in docs/adr, in windows of 2,048 tokens.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engine.cpu_kv import KINDS, CachedModel
from benchmarks.engine.peer_process import PEERS
from benchmarks.output import JsonFile, write_figures
from workers.models.decoder import Decoder
from workers.models.loader import load_model

ROOT = Path(__file__).parents[2]
NUM_QUESTIONS, ANSWER = 60, 48
NUM_WINDOWS, WINDOW = 4, 2048
Sequences = Sequence[tuple[list[int], list[int]]]
"""Token ids of a prompt and of the reference's answer."""
Scores = Sequence[Sequence[tuple[float, int]]]
"""For each token of each answer its log-probability, and the likeliest token in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedRun:
    """`distance`: mean of the absolute differences from the reference's log-probabilities, in nats. `num_changed`
    answers of greedy sampling differ from the reference's."""

    engine: str
    distance: float
    num_changed: int
    perplexity: float | None = None


def questions() -> list[tuple[str, str]]:
    """Each with a pattern that a right answer contains."""
    return [(question, right) for question, right in json.loads(Path(__file__).with_name("questions.json").read_text())]


def reference_answers(model: Any, tokenizer: Any) -> Sequences:
    sequences = []
    for question, _ in questions()[:NUM_QUESTIONS]:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        tokens = model.generate(torch.tensor([ids]), max_new_tokens=ANSWER, do_sample=False)
        sequences.append((ids, tokens[0][len(ids) :].tolist()))
    return sequences


def scores(logits_TV: torch.Tensor, token_ids: list[int]) -> list[tuple[float, int]]:
    logprobs_T = logits_TV.float().log_softmax(-1)[torch.arange(len(token_ids)), token_ids]
    return list(zip(logprobs_T.tolist(), logits_TV.argmax(-1).tolist(), strict=True))


def cached_scores(cache: CachedModel, prompt_ids: list[int], answer_ids: list[int]) -> list[tuple[float, int]]:
    rows = [cache.logits(prompt_ids, 0)[-1]]
    for place, token_id in enumerate(answer_ids[:-1], len(prompt_ids)):
        rows.append(cache.logits([token_id], place)[0])
    return scores(torch.stack(rows), answer_ids)


def run_of(engine: str, scored: Scores, reference: Scores, perplexity: float | None = None) -> RoundedRun:
    pairs = [list(zip(mine, right, strict=True)) for mine, right in zip(scored, reference, strict=True)]
    distances = [abs(mine[0] - right[0]) for answer in pairs for mine, right in answer]
    return RoundedRun(
        engine=engine,
        distance=sum(distances) / len(distances),
        num_changed=sum(any(mine[1] != right[1] for mine, right in answer) for answer in pairs),
        perplexity=perplexity,
    )


def perplexity(windows: Sequence[list[int]], logits: Callable[[list[int]], torch.Tensor]) -> float:
    logprobs = [logprob for window in windows for logprob, _ in scores(logits(window[:-1]), window[1:])]
    return float(torch.tensor(logprobs).mean().neg().exp())


def llama_scores(python: Path, file: Path, sequences: Sequences) -> tuple[str, Scores]:
    task = {"model": str(file), "sequences": sequences, "num_threads": torch.get_num_threads()}
    command = [str(python), str(PEERS / "llama_logprobs.py")]
    printed = subprocess.run(command, input=json.dumps(task), stdout=subprocess.PIPE, text=True, check=True).stdout
    told = json.loads(printed.splitlines()[-1])
    return f"llama.cpp ({told['version']})", told["answers"]


@torch.inference_mode()
def measured(file: Path, llama_python: Path | None) -> list[RoundedRun]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    exact = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "adr").glob("*.md")))
    ids: list[int] = tokenizer(text)["input_ids"]
    windows = [ids[start : start + WINDOW] for start in range(0, NUM_WINDOWS * WINDOW, WINDOW)]
    sequences = reference_answers(exact, tokenizer)
    reference = [
        scores(exact(torch.tensor([ids + answer[:-1]])).logits[0, len(ids) - 1 :], answer) for ids, answer in sequences
    ]
    whole = perplexity(windows, lambda ids: exact(torch.tensor([ids])).logits[0])
    runs = [run_of("transformers, float32", reference, reference, whole)]
    model: Decoder = load_model(file, dtype="bfloat16")
    model.pack()
    for kind in KINDS:
        cache = CachedModel(model, kind, WINDOW)
        scored = [cached_scores(cache, *sequence) for sequence in sequences]
        ppl = perplexity(windows, partial(cache.logits, start=0))
        runs.append(run_of(f"Baton, bfloat16, KV {kind}", scored, reference, ppl))
    if llama_python is not None:
        runs.append(run_of(*llama_scores(llama_python, file, sequences), reference))
    return runs


def main(
    file: Annotated[Path, typer.Argument(help="A GGUF file that transformers reads.")],
    llama_python: Annotated[Path | None, typer.Option(help="The interpreter of an environment with xllamacpp.")] = None,
    json_file: JsonFile = None,
) -> None:
    runs = measured(file, llama_python)
    table = Table("engine", "distance, nats", "answers changed", "perplexity")
    for run in runs:
        ppl = f"{run.perplexity:.3f}" if run.perplexity is not None else ""
        table.add_row(run.engine, f"{run.distance:.4f}", f"{run.num_changed} of {NUM_QUESTIONS}", ppl)
    Console().print(table)
    write_figures(json_file, runs=[asdict(run) for run in runs])


if __name__ == "__main__":
    typer.run(main)
