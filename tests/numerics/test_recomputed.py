"""On CPUs with compiled kernels a token gets the same bits whether it decodes or is prefilled with others: an
answer that another worker resumes from its prompt and its tokens has the tokens of an undisturbed one."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine.cpu_engine import DEMO, opened
from protos.values import GenerateRequest, KVLayout, Logprobs, SamplingParams
from tests.numerics.filled import filled, normal
from workers.attention.backend import AttentionInputs, AttentionOptions, GroupTables
from workers.attention.cpu import cpu_attention
from workers.engine.engine import Engine
from workers.kernels.cpu.native_build import native
from workers.kv.kinds import with_kv_dtype
from workers.worker_config import KVDtype

pytestmark = pytest.mark.skipif(native(torch.bfloat16) is None, reason="no C++ compiler")


@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(None, 0.0, False), (5, 0.0, False), (64, 2.0, True), (100, 0.0, False)]
)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 64), (3, 3, 96), (8, 2, 128), (12, 1, 32)])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.bfloat16, "auto"), (torch.float32, "auto"), (torch.bfloat16, "int8"), (torch.float32, "fp8")],
)
def test_attention_has_the_same_bits_for_a_token_that_decodes(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    softcap: float,
    has_sinks: bool,
    dtype: torch.dtype,
    kv_dtype: KVDtype,
) -> None:
    num_new, num_cached = 90, 70
    layout = KVLayout.dense(
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=16,
        dtype=str(dtype).removeprefix("torch."),
    )
    storage, inputs = filled(with_kv_dtype(layout, kv_dtype), ((num_new, num_cached),))
    q_TND = normal(num_new, num_heads, head_dim, dtype=dtype, seed=3)
    sinks_N = normal(num_heads, dtype=torch.float32, seed=4) if has_sinks else None
    options = AttentionOptions(scale=head_dim**-0.5, window=window, softcap=softcap, sinks_N=sinks_N)
    backend = cpu_attention(storage)
    backend.begin(inputs)
    read_TND = backend.attend(0, q_TND, options)
    backend.begin(
        AttentionInputs(
            positions_T=inputs.positions_T,
            query_starts=tuple(range(num_new + 1)),
            context_lens=tuple(num_cached + nth + 1 for nth in range(num_new)),
            tables=(
                GroupTables(
                    slots_T=inputs.tables[0].slots_T,
                    block_tables_SB=inputs.tables[0].block_tables_SB.expand(num_new, -1).contiguous(),
                ),
            ),
            max_query=1,
            max_context=num_cached + num_new,
        )
    )
    decoded_TND = backend.attend(0, q_TND, options)
    assert torch.equal(read_TND, decoded_TND)


def test_a_recomputed_answer_has_the_same_logprobs() -> None:
    prompt_ids = tuple(range(300, 400))
    with opened(DEMO) as engine:
        token_ids, logprobs = answer(engine, prompt_ids, 90)
    for num_given in (37, 70):
        with opened(DEMO) as engine:
            further = answer(engine, (*prompt_ids, *token_ids[:num_given]), 90 - num_given)
        assert further == (token_ids[num_given:], logprobs[num_given:])


def answer(engine: Engine, prompt_ids: tuple[int, ...], max_tokens: int) -> tuple[list[int], list[Logprobs]]:
    """Greedy."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
    engine.submit(GenerateRequest(request_id="r", prompt_ids=prompt_ids, sampling=sampling), now=0.0)
    token_ids: list[int] = []
    logprobs: list[Logprobs] = []
    while engine.has_work():
        for update in engine.step(now=0.0):
            token_ids += update.token_ids
            logprobs += update.logprobs
    return token_ids, logprobs
