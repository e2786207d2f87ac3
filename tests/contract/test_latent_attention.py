"""Every backend's attention over latents against a matrix of them written out in full, in float64: rows that decode and
rows with a chunk, over scattered pages. What no row may see is NaN."""

from __future__ import annotations

import pytest
import torch

from protos.values import LATENT, KVLayout
from tests.contract.test_attention import device_of, turned
from workers.attention.backend import AttentionInputs, AttentionOptions, GroupTables
from workers.attention.registry import BACKENDS, attention_for
from workers.kv.kv_storage import KVStorage

BLOCK_SIZE = 16
ROWS = ((1, 0), (5, 70), (1, 129), (9, 0), (1, 63), (18, 50))
"""(tokens computed now, tokens in the cache before) of each row"""


class FilledLatents:
    """Latents of `rank` and `rope_dim` numbers, in a cache that holds all but the present tokens'."""

    def __init__(self, num_heads: int, rank: int, rope_dim: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self.rank, self.device = rank, device
        generator = torch.Generator().manual_seed(num_heads)
        layout = KVLayout.latent(
            num_layers=2, width=rank + rope_dim, dtype=str(dtype).removeprefix("torch."), block_size=BLOCK_SIZE
        )
        counts = [-(-(new + cached) // BLOCK_SIZE) for new, cached in ROWS]
        order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        self.storage = KVStorage(layout, num_blocks=sum(counts) + 2, device=device)
        self.storage.data.fill_(float("nan"))

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.latents = [normal(new + cached, 1, rank + rope_dim) for new, cached in ROWS]
        self.q_TNW = normal(sum(new for new, _ in ROWS), num_heads, rank + rope_dim)
        angles_TP = torch.rand(len(self.q_TNW), rope_dim // 2, generator=generator) * 6
        self.rotation = angles_TP.cos(), angles_TP.sin()
        cache = self.storage.part(1, LATENT)
        for (_, cached), latents_C1W, table in zip(ROWS, self.latents, self.tables, strict=True):
            for position in range(cached):
                cache[table[position // BLOCK_SIZE], :, position % BLOCK_SIZE] = latents_C1W[position].to(device)

    def inputs(self) -> AttentionInputs:
        starts = [0]
        slots: list[int] = []
        positions: list[int] = []
        for (new, cached), table in zip(ROWS, self.tables, strict=True):
            starts.append(starts[-1] + new)
            here = range(cached, cached + new)
            positions += here
            slots += [table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in here]
        tables = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(table, dtype=torch.int32) for table in self.tables], batch_first=True
        )
        group = GroupTables(slots_T=torch.tensor(slots, device=self.device), block_tables_SB=tables.to(self.device))
        return AttentionInputs(
            positions_T=torch.tensor(positions, device=self.device),
            query_starts=tuple(starts),
            context_lens=tuple(new + cached for new, cached in ROWS),
            tables=(group,),
            max_query=max(new for new, _ in ROWS),
            max_context=max(new + cached for new, cached in ROWS),
        )

    def run(self, name: str) -> torch.Tensor:
        backend = attention_for(self.storage, name)
        backend.begin(self.inputs())
        new_T1W = torch.cat([latents[cached:] for (_, cached), latents in zip(ROWS, self.latents, strict=True)])
        new_T1W, q_TNW = new_T1W.to(self.device), self.q_TNW.to(self.device)
        cos_TP, sin_TP = (part.to(self.device) for part in self.rotation)
        q_TNW = backend.write(1, q_TNW, new_T1W, new_T1W[..., : self.rank], (cos_TP, sin_TP))
        return backend.attend(1, q_TNW, AttentionOptions(scale=0.2, window=None, value_dim=self.rank)).cpu()

    def expected(self) -> torch.Tensor:
        """[T, N, rank], float64."""
        outputs, start, still = [], 0, self.rank
        cos_TP, sin_TP = (part.double() for part in self.rotation)
        for (new, cached), latents_C1W in zip(ROWS, self.latents, strict=True):
            here = slice(start, start + new)
            latents, q_QNW = latents_C1W.double().clone(), self.q_TNW[here].double().clone()
            latents[cached:, :, still:] = turned(latents[cached:, :, still:], cos_TP[here], sin_TP[here])
            q_QNW[..., still:] = turned(q_QNW[..., still:], cos_TP[here], sin_TP[here])
            keys_CW = latents[:, 0]
            scores_NQC = q_QNW.transpose(0, 1) @ keys_CW.T * 0.2
            visible_QC = torch.arange(cached, cached + new)[:, None] >= torch.arange(cached + new)
            weights_NQC = scores_NQC.masked_fill(~visible_QC, float("-inf")).softmax(-1)
            outputs.append((weights_NQC @ keys_CW[:, : self.rank]).transpose(0, 1))
            start += new
        return torch.cat(outputs)


@pytest.mark.parametrize("name", sorted(BACKENDS))
@pytest.mark.parametrize(("num_heads", "rank", "rope_dim"), [(3, 20, 6), (16, 64, 16)])
def test_rows_attend_to_the_latents_of_their_own_context(name: str, num_heads: int, rank: int, rope_dim: int) -> None:
    filled = FilledLatents(num_heads, rank, rope_dim, torch.float32, device_of(name))
    torch.testing.assert_close(filled.run(name).double(), filled.expected(), rtol=1e-5, atol=1e-5)


def test_bfloat16_latents_agree_to_its_precision() -> None:
    filled = FilledLatents(5, 48, 8, torch.bfloat16)
    torch.testing.assert_close(filled.run("cpu").double(), filled.expected(), rtol=0.03, atol=0.03)
