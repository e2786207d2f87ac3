"""Every attention backend against a mask written out in full, and against one another, in float64.

Random mixes of rows that decode one token and rows that compute a chunk, over scattered pages.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from dataclasses import replace as replaced

import pytest
import torch
from msgspec.structs import replace

from protos.errors import Misconfigured
from protos.values import KVGroup, KVLayout
from workers.attention.backend import AttentionInputs, AttentionOptions, GroupTables
from workers.attention.registry import BACKENDS, attention_for
from workers.kernels import twins
from workers.kv.kinds import with_kv_dtype
from workers.kv.kv_storage import KVStorage
from workers.worker_config import KVDtype

CASES = range(24)
ROUNDED = ("cpu", "cuda", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rows of (tokens computed now, tokens in the cache before), and the shape of the cache."""

    rows: tuple[tuple[int, int], ...]
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    seed: int
    softcap: float = 0.0
    has_sinks: bool = False

    @classmethod
    def random(cls, seed: int) -> Case:
        chance = random.Random(seed)
        kinds = {"decode": (1, 1), "prefill": (2, 20), "mixed": (1, 12)}
        low, high = kinds[chance.choice(list(kinds))]
        num_kv_heads = chance.choice([1, 2, 3])
        return cls(
            rows=tuple(
                (chance.randint(low, high), chance.choice([0, 0, chance.randint(1, 70)]))
                for _ in range(chance.randint(1, 5))
            ),
            block_size=chance.choice([1, 4, 7, 16]),
            num_heads=num_kv_heads * chance.choice([1, 2, 4]),
            num_kv_heads=num_kv_heads,
            head_dim=chance.choice([8, 16]),
            window=chance.choice([None, None, 1, 5, 33, 500]),
            seed=seed,
        )


class Filled:
    """A case's tensors: each row's keys and values in order, and a cache that holds all but the present tokens.

    What the backend gets lies on `device`; results, and what is compared with them, on the CPU.
    """

    def __init__(
        self,
        case: Case,
        dtype: torch.dtype,
        device: str = "cpu",
        *,
        grouped: bool = False,
        kv_dtype: KVDtype = "auto",
    ) -> None:
        self.device = device
        self.case = case
        self.kv_dtype = kv_dtype
        generator = torch.Generator().manual_seed(case.seed)
        layout = KVLayout.dense(
            num_layers=2,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            block_size=case.block_size,
            dtype=str(dtype).removeprefix("torch."),
        )
        if grouped:  # each layer has tables of its own
            groups = tuple(KVGroup(layers=(layer,), parts=layout.parts) for layer in range(2))
            layout = replace(layout, groups=groups)
        layout = with_kv_dtype(layout, kv_dtype)
        lens = [new + cached for new, cached in case.rows]
        counts = [-(-length // case.block_size) for length in lens]
        order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        # Memory that no row owns, or after a row's end, must not be read, whatever it holds.
        factors_K = torch.rand(case.num_kv_heads, generator=generator) + 0.5
        self.fp8_scales = factors_K / 8, factors_K / 16
        self.storage = KVStorage(
            layout, num_blocks=len(order), device=device, fp8_scales={1: self.fp8_scales} if kv_dtype == "fp8" else None
        )
        for tensor in self.storage.tensors:
            tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 0x7F)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.kv = [normal(2, length, case.num_kv_heads, case.head_dim) for length in lens]
        self.q_TND = normal(sum(new for new, _ in case.rows), case.num_heads, case.head_dim)
        self.sinks_N = torch.randn(case.num_heads, generator=generator) * 2 if case.has_sinks else None
        angles_TP = torch.rand(len(self.q_TND), case.head_dim // 2, generator=generator) * 6
        self.rotation = angles_TP.cos(), angles_TP.sin()
        self.blocks = [[order.pop() for _ in range(count)] for count in counts]
        self.foreign = order.pop()
        for (_, cached), kv, blocks in zip(case.rows, self.kv, self.blocks, strict=True):
            size = case.block_size
            slots = [blocks[position // size] * size + position % size for position in range(cached)]
            k_TKD, v_TKD = kv[:, :cached].to(device)
            caches = self.storage.keys(1), self.storage.values(1)
            twins.kv_write(k_TKD, v_TKD, *caches, torch.tensor(slots).long().to(device), self.storage.scales(1))

    def inputs(self) -> AttentionInputs:
        starts: list[int] = [0]
        positions: list[int] = []
        slots: list[int] = []
        size = self.case.block_size
        for (new, cached), blocks in zip(self.case.rows, self.blocks, strict=True):
            starts.append(starts[-1] + new)
            positions += range(cached, cached + new)
            slots += [blocks[position // size] * size + position % size for position in range(cached, cached + new)]
        tables = [torch.tensor(blocks, dtype=torch.int32) for blocks in self.blocks]
        for table_B, (_, cached) in zip(tables, self.case.rows, strict=True):
            if self.case.window is not None:  # what lies behind it was given back, and holds KV of others
                table_B[: max(0, cached + 1 - self.case.window) // size] = self.foreign
        context_lens = tuple(new + cached for new, cached in self.case.rows)
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        here = GroupTables(slots_T=torch.tensor(slots, device=self.device), block_tables_SB=padded.to(self.device))
        none = GroupTables(
            slots_T=torch.full_like(here.slots_T, -1), block_tables_SB=torch.zeros_like(here.block_tables_SB)
        )
        return AttentionInputs(
            positions_T=torch.tensor(positions, device=self.device),
            query_starts=tuple(starts),
            context_lens=context_lens,
            tables=(none, here) if len(self.storage.layout.groups) > 1 else (here,),
            max_query=max(new for new, _ in self.case.rows),
            max_context=max(context_lens),
        )

    def run(self, name: str) -> torch.Tensor:
        backend, inputs = attention_for(self.storage, name), self.inputs()
        backend.begin(inputs)
        new_kv = torch.cat([kv[:, cached:] for (_, cached), kv in zip(self.case.rows, self.kv, strict=True)], dim=1)
        q_TND, (k_TKD, v_TKD) = self.q_TND.to(self.device), new_kv.to(self.device)
        cos_TP, sin_TP = (part.to(self.device) for part in self.rotation)
        self.turned_TND = backend.write(1, q_TND, k_TKD, v_TKD, (cos_TP, sin_TP))
        sinks_N = None if self.sinks_N is None else self.sinks_N.to(self.device)
        case = self.case
        options = AttentionOptions(scale=0.3, window=case.window, softcap=case.softcap, sinks_N=sinks_N)
        return backend.attend(1, self.turned_TND, options).cpu()

    def expected(self) -> torch.Tensor:
        """Row by row with the whole mask, in float64 [T, N, D]."""
        outputs, start = [], 0
        cos_TP, sin_TP = (part.double() for part in self.rotation)
        for (new, cached), kv in zip(self.case.rows, self.kv, strict=True):
            here = slice(start, start + new)
            k_CKD, v_CKD = self._cached(kv, cached, here)
            k_NCD, v_NCD = (
                part.repeat_interleave(self.case.num_heads // self.case.num_kv_heads, dim=1).transpose(0, 1)
                for part in (k_CKD, v_CKD)
            )
            q_NQD = turned(self.q_TND[here].double(), cos_TP[here], sin_TP[here]).transpose(0, 1)
            distance_QC = torch.arange(cached, cached + new)[:, None] - torch.arange(cached + new)
            visible_QC = (distance_QC >= 0) & (distance_QC < (self.case.window or cached + new))
            scores_NQC = q_NQD @ k_NCD.mT * 0.3
            if self.case.softcap:
                scores_NQC = torch.tanh(scores_NQC / self.case.softcap) * self.case.softcap
            weights_NQC = scores_NQC.masked_fill(~visible_QC, float("-inf")).exp()
            sums_NQ1 = weights_NQC.sum(-1, keepdim=True)
            if self.sinks_N is not None:
                sums_NQ1 += self.sinks_N.double().exp()[:, None, None]
            outputs.append((weights_NQC / sums_NQ1 @ v_NCD).transpose(0, 1))
            start += new
        return torch.cat(outputs)

    def _cached(self, kv: torch.Tensor, cached: int, here: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """A row's keys and values as the cache would return them, rotated from token `cached` on."""
        cos_TP, sin_TP = (part[here] for part in self.rotation)
        if self.kv_dtype == "auto":
            k_CKD, v_CKD = kv.double()
            k_CKD[cached:] = turned(k_CKD[cached:], cos_TP.double(), sin_TP.double())
            return k_CKD, v_CKD
        k_CKD, v_CKD = kv.clone()
        k_CKD[cached:] = twins.rope(k_CKD[cached:], cos_TP, sin_TP)  # a rounding that turns would be a whole step
        return self._rounded(k_CKD, self.fp8_scales[0]), self._rounded(v_CKD, self.fp8_scales[1])

    def _rounded(self, x_CKD: torch.Tensor, scale_K: torch.Tensor) -> torch.Tensor:
        wide_CKD = x_CKD.double()
        if self.kv_dtype == "int8":
            steps_CK1 = wide_CKD.abs().amax(-1, keepdim=True) / 127
            return (wide_CKD / steps_CK1).round() * steps_CK1
        return (x_CKD.float() / scale_K[:, None]).to(torch.float8_e4m3fn).double() * scale_K[:, None].double()


def turned(x_THD: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor) -> torch.Tensor:
    """The pairs (i, i + D / 2) as complex numbers, times those of length 1 at the token's angles."""
    first_THP, second_THP = x_THD.chunk(2, dim=-1)
    pairs_THP = torch.complex(first_THP, second_THP) * torch.complex(cos_TP, sin_TP).unsqueeze(1)
    return torch.cat((pairs_THP.real, pairs_THP.imag), dim=-1)


def device_of(name: str) -> str:
    """Without a GPU, the CUDA backend's kernels are interpreted."""
    return "cuda" if name == "cuda" and torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("name", sorted(BACKENDS))
@pytest.mark.parametrize("seed", CASES)
def test_rows_attend_to_their_own_context_and_nothing_else(name: str, seed: int) -> None:
    filled = Filled(Case.random(seed), torch.float32, device_of(name))
    torch.testing.assert_close(filled.run(name).double(), filled.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(BACKENDS))
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.7, False), (50.0, True), (0.0, True)])
@pytest.mark.parametrize("seed", [1, 5, 6])
def test_scores_are_capped_and_sinks_take_their_share(name: str, softcap: float, has_sinks: bool, seed: int) -> None:
    case = replaced(Case.random(seed), softcap=softcap, has_sinks=has_sinks)
    filled = Filled(case, torch.float32, device_of(name))
    torch.testing.assert_close(filled.run(name).double(), filled.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("seed", range(8))
def test_cached_8_bit_keys_and_values_have_their_rounded_value(name: str, seed: int, kv_dtype: KVDtype) -> None:
    filled = Filled(Case.random(seed), torch.float32, device_of(name), kv_dtype=kv_dtype)
    torch.testing.assert_close(filled.run(name).double(), filled.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, in the interpreter
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_broken_token_breaks_every_token_that_sees_it(name: str, number: float, kv_dtype: KVDtype) -> None:
    """In any cache type: a sampler gets NaN, never a plausible number."""
    case = Case(rows=((3, 9), (1, 9)), block_size=4, num_heads=2, num_kv_heads=1, head_dim=16, window=None, seed=3)
    filled = Filled(case, torch.float32, device_of(name), kv_dtype=kv_dtype)
    caches = filled.storage.keys(1), filled.storage.values(1)
    broken_TKD = torch.full((1, 1, 16), number, device=filled.device)
    slots_T = torch.tensor([filled.blocks[0][1] * case.block_size], device=filled.device)
    twins.kv_write(broken_TKD, broken_TKD, *caches, slots_T, filled.storage.scales(1))
    out_TND = filled.run(name)
    assert not out_TND[:3].isfinite().any()
    assert out_TND[3].isfinite().all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bfloat16_backends_agree_to_its_precision(seed: int) -> None:
    filled = Filled(Case.random(seed), torch.bfloat16)
    torch.testing.assert_close(filled.run("cpu"), filled.run("torch"), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_a_step_reads_earlier_writes_through_any_window(name: str) -> None:
    """One backend object, two steps, two windows in the second: nothing of the first step's plan is left."""
    case = Case(rows=((6, 0), (1, 9)), block_size=4, num_heads=2, num_kv_heads=1, head_dim=8, window=3, seed=5)
    filled = Filled(case, torch.float32, device_of(name))
    first = filled.run(name)
    backend = attention_for(filled.storage, name)
    backend.begin(filled.inputs())
    again, wider, once_more = (
        backend.attend(1, filled.turned_TND, AttentionOptions(scale=0.3, window=window)).cpu()
        for window in (3, None, 3)
    )
    assert torch.equal(again, first)
    assert not torch.allclose(wider, first)
    assert torch.equal(once_more, first)


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_a_layer_is_attended_by_the_tables_of_its_group(name: str) -> None:
    case = Case(rows=((6, 2), (1, 9)), block_size=4, num_heads=2, num_kv_heads=1, head_dim=8, window=5, seed=5)
    filled = Filled(case, torch.float32, device_of(name), grouped=True)
    torch.testing.assert_close(filled.run(name).double(), filled.expected(), rtol=1e-5, atol=1e-5)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(Misconfigured, match="'flash': choose one of cpu"):
        attention_for(Filled(Case.random(0), torch.float32).storage, "flash")
