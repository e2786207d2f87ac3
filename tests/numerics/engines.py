"""A whole colocated engine in this process, over one or several ranks, and the oracle's greedy answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from protos.values import FinishReason, GenerateRequest, SamplingParams, SequenceUpdate
from workers.build_rank import LoadedRank, build_engine, device_of, follow_rank0, make_transfer, open_rank
from workers.engine.engine import Engine
from workers.parallel.ranks import Leader, find_store, join_group, open_store
from workers.scheduling.role import Role
from workers.worker_config import WorkerConfig

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    updates: list[SequenceUpdate] = field(default_factory=list)

    @property
    def num_cached_tokens(self) -> int:
        return max(update.num_cached_tokens for update in self.updates)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.updates[-1].finish_reason


@contextmanager
def ranks_of(config: WorkerConfig) -> Iterator[list[LoadedRank]]:
    """Opens all ranks of a worker, each on its own thread."""
    store = open_store("127.0.0.1")
    stores = [store, *(find_store("127.0.0.1", store.port, key=store.key) for _ in range(1, config.tp))]

    def open_one(rank: int) -> LoadedRank:
        group = join_group(stores[rank], rank=rank, size=config.tp, name="w0", device=device_of(config), timeout_s=30.0)
        return open_rank(config, group)

    with ThreadPoolExecutor(config.tp) as pool:
        ranks = list(pool.map(open_one, range(config.tp)))
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.group.close()
            for ranks_store in stores:  # where there is one rank no group has closed it
                ranks_store.close()


@contextmanager
def colocated(config: WorkerConfig) -> Iterator[Engine]:
    with ranks_of(config) as (first, *others), ThreadPoolExecutor(max(1, len(others))) as pool:
        followers = [pool.submit(follow_rank0, rank, make_transfer(rank)) for rank in others]
        leader = Leader(first.group)
        engine = build_engine(first, leader, lambda _: Role(), incarnation=1, clock=lambda: 0.0)
        try:
            yield engine
        finally:
            leader.close()
        for follower in followers:
            follower.result()


def answer(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] = GREEDY
) -> list[Answer]:
    """Submits all prompts together and steps until the engine is idle, checking its books after every step."""
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for index, (prompt, sampling) in enumerate(zip(prompts, many, strict=True)):
        engine.submit(GenerateRequest(request_id=str(index), prompt_ids=tuple(prompt), sampling=sampling), now=0.0)
    answers = [Answer() for _ in prompts]
    while engine.has_work():
        for update in engine.step(now=0.0):
            assert update.error is None
            answers[int(update.request_id)].token_ids += update.token_ids
            answers[int(update.request_id)].updates.append(update)
        engine.check_integrity()
    engine.assert_idle()
    return answers


@torch.no_grad()
def oracle_answers(
    model: Any, prompts: Sequence[Sequence[int]], num_tokens: int = 64, **generation: Any
) -> list[list[int]]:
    """Greedy answers of transformers. Asserts that no choice is so close that rounding decides it."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **generation,
        )
        best = torch.stack(out.scores)[:, 0].topk(2).values
        gap = (best[:, 0] - best[:, 1]).min().item()
        assert gap > 2e-5, f"the oracle chose by {gap:.2g}: take another seed for this checkpoint"
        answers.append(out.sequences[0, len(prompt) :].tolist())
    return answers
