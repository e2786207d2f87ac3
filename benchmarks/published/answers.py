"""Right answers of a published model by sampling, and how many drafts its answers accept.

    python -m benchmarks.published.answers FILE.gguf

The 60 questions of questions.json are asked with three seeds each, at OpenAI's sampling (temperature 1, nothing cut)
and at that of `baton chat`. Drafts are counted in greedy answers to the questions and to requests that copy held-out
source code. Every draft is as long as it may be, whatever it costs; "model" drafts with the served model itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.output import JsonFile, write_figures
from benchmarks.published.rounding import questions
from benchmarks.speculation.texts import source_passages
from cluster.cli.chat_verb import CHAT_SAMPLING
from protos.values import GenerateRequest, SamplingParams
from workers.build_rank import build_engine, open_rank
from workers.parallel.group import Solo
from workers.parallel.ranks import Leader
from workers.scheduling.role import Role
from workers.speculation.speculation import SpeculationCounts
from workers.worker_config import WorkerConfig

ANSWER, SEEDS = 64, 3
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {"OpenAI's": {"temperature": 1.0}, "baton chat": CHAT_SAMPLING}
TASKS = ("Repeat this code:", "Add a docstring to this code:")
Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRun:
    sampling: str
    num_right: int
    num_answers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedRun:
    """`accepted`: for each position, the share of drafts that were accepted up to it."""

    drafts: str
    prompts: str
    num_tokens: int
    num_drafted: int
    num_accepted: int
    accepted: tuple[float, ...]
    tokens_per_row: float


def answers(
    file: Path, prompts: Prompts, samplings: Sequence[SamplingParams], speculate: str = "off", at_once: int = 16
) -> tuple[list[list[int]], SpeculationCounts | None]:
    """Returns the token ids of an answer to each prompt. No step takes time, so that every draft pays."""
    config = WorkerConfig(model=str(file), device="cpu", num_blocks=2048, speculate=speculate, max_drafts=4)
    rank = open_rank(config, Solo())
    leader = Leader(rank.group)
    engine = build_engine(rank, leader, lambda _: Role(), incarnation=1, clock=lambda: 0.0)
    answered: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(prompts), at_once):
        for number, prompt_ids in enumerate(prompts[first : first + at_once], first):
            request = GenerateRequest(request_id=str(number), prompt_ids=prompt_ids, sampling=samplings[number])
            engine.submit(request, now=0.0)
        while engine.has_work():
            for update in engine.step(now=0.0):
                assert update.error is None, update.error
                answered[int(update.request_id)] += update.token_ids
    leader.close()
    speculation = engine.scheduler.speculation
    return answered, speculation.counts if speculation is not None else None


def drafted(file: Path, drafts: str, name: str, prompts: Prompts, greedy: SamplingParams) -> DraftedRun:
    _, counts = answers(file, prompts, [greedy] * len(prompts), f"model:{file}" if drafts == "model" else drafts)
    assert counts is not None
    sources = counts.sources.values()
    drafted_at = [sum(at) for at in zip_longest(*(source.drafted_at for source in sources), fillvalue=0)]
    accepted_at = [sum(at) for at in zip_longest(*(source.accepted_at for source in sources), fillvalue=0)]
    return DraftedRun(
        drafts=drafts,
        prompts=name,
        num_tokens=counts.num_tokens,
        num_drafted=counts.num_drafted,
        num_accepted=counts.num_accepted,
        accepted=tuple([round(right / number, 3) for right, number in zip(accepted_at, drafted_at, strict=True)]),
        tokens_per_row=counts.num_tokens / counts.num_rows,
    )


def main(
    file: Annotated[Path, typer.Argument(help="A GGUF file that transformers reads.")], json_file: JsonFile = None
) -> None:
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)

    def prompt(text: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": text}]
        return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    ends: dict[str, Any] = {"max_tokens": ANSWER, "stop_token_ids": (tokenizer.eos_token_id,)}
    asked = [pair for pair in questions() for _ in range(SEEDS)]
    sampled, drafts = list[SampledRun](), list[DraftedRun]()
    for name, sampling in SAMPLINGS.items():
        params = [SamplingParams(seed=number, **sampling, **ends) for number in range(len(asked))]
        made, _ = answers(file, [prompt(question) for question, _ in asked], params)
        right = sum(bool(re.search(pair[1], tokenizer.decode(ids))) for pair, ids in zip(asked, made, strict=True))
        sampled.append(SampledRun(sampling=name, num_right=right, num_answers=len(asked)))
        print(sampled[-1], flush=True)
    greedy = SamplingParams(temperature=0.0, **ends)
    kinds = {
        "questions": [prompt(question) for question, _ in questions()[:20]],
        "copies": [
            prompt(f"{task}\n```python\n{code[:500]}\n```") for code in source_passages()[:10] for task in TASKS
        ],
    }
    for mode in ("ngram", "suffix", "model"):
        for name, prompts in kinds.items():
            drafts.append(drafted(file, mode, name, prompts, greedy))
            print(drafts[-1], flush=True)
    table = Table("drafts", "prompts", "drafted", "accepted up to position 1, 2, ...", "tokens a row")
    for run in drafts:
        shares = " ".join(f"{share:.2f}" for share in run.accepted)
        table.add_row(run.drafts, run.prompts, str(run.num_drafted), shares, f"{run.tokens_per_row:.2f}")
    Console().print(table)
    write_figures(json_file, sampled=[asdict(run) for run in sampled], drafts=[asdict(run) for run in drafts])


if __name__ == "__main__":
    typer.run(main)
