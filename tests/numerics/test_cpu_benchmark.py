"""The benchmark's random model is one that transformers reads too, and its floors are sums that one can do by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.cpu_engine import LARGE, draw, figures_of, on_baton, record, scaled
from benchmarks.engine.floors import MachineRates, ModelCosts, TokenLoad, best_of, needs
from benchmarks.engine.peer_process import EngineRun
from benchmarks.engine.random_llama import CONFIG, shapes, write_checkpoint
from benchmarks.engine.random_quantised import write_quantised
from benchmarks.output import write_bars
from workers.models.model_config import read_config

SMALL = CONFIG | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 4096,
}
COSTS = ModelCosts(layer_params=1000, head_params=100, weight_bytes=2200, kv_bytes=6, flops_per_pair=4)
MACHINE = MachineRates(num_threads=1, bytes_per_s=1e3, flops_per_s=1e6)


def test_the_random_checkpoint_has_every_parameter_and_no_other(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL)
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    costs = ModelCosts.of(read_config(tmp_path))
    norms, embedding = 32 * (2 * 2 + 1), 4096 * 32
    assert costs.layer_params + costs.head_params + norms + embedding == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("method", "bits"), [("gptq", 4.16), ("awq", 4.16), ("w8a8", 8.11)])
def test_random_quantised_models_are_served(method: str, bits: float, tmp_path: Path) -> None:
    config = (
        CONFIG | SMALL | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "tie_word_embeddings": True}
    )
    write_quantised(tmp_path, method, config)
    rounds = on_baton(tmp_path, [TokenLoad(name="", num_requests=1, input_len=3, output_len=2)], 1)
    assert rounds[0][0].seconds > 0
    costs = ModelCosts.of_files(tmp_path)
    others = 2 * (costs.head_params + 128 * 5)
    if method == "gptq":
        others += 4 * sum(shape[1] for name, shape in shapes(config).items() if "_proj" in name)  # g_idx
    assert (costs.weight_bytes - others) * 8 / costs.layer_params == pytest.approx(bits, rel=0.01)
    write_checkpoint(tmp_path, config | {"tie_word_embeddings": False})
    assert ModelCosts.of_files(tmp_path).weight_bytes == 2 * (costs.layer_params + costs.head_params + 128 * 5)


def test_a_workloads_floor_is_the_sum_over_its_tokens() -> None:
    workload = TokenLoad(name="", num_requests=2, input_len=3, output_len=3)
    prefill, decode = needs(workload, COSTS, tokens_of_step=4)
    assert prefill.flops == 2 * (3 * 2000 + 200 + 4 * (1 + 2 + 3))
    assert prefill.num_bytes == 2 * 2200  # six tokens, in steps of four
    assert decode.flops == 2 * (2 * 2200 + 4 * (4 + 5))
    assert decode.num_bytes == 2 * 2200 + 2 * 6 * (4 + 5)


def test_the_slower_of_products_and_memory_is_the_floor() -> None:
    workload = TokenLoad(name="", num_requests=1, input_len=1, output_len=2)
    prefill, _ = needs(workload, COSTS)
    assert prefill.floor_s(MACHINE) == pytest.approx(2200 / 1e3)
    quick = MachineRates(num_threads=1, bytes_per_s=1e9, flops_per_s=1e3)
    assert prefill.floor_s(quick) == pytest.approx(prefill.flops / 1e3)
    assert best_of([MACHINE, quick]) == MachineRates(num_threads=1, bytes_per_s=1e9, flops_per_s=1e6)


def test_fewer_requests_of_the_same_lengths_and_each_load_once() -> None:
    sizes = [(entry.name, entry.num_requests) for entry in scaled(LARGE, 8)]
    assert sizes == [("4 x (512 -> 128)", 4), ("1 x (2048 -> 32)", 1), ("1 x (256 -> 64)", 1), ("2 x (256 -> 64)", 2)]
    assert scaled(LARGE, 1) == list(LARGE)


def test_the_best_round_of_an_engine_becomes_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_checkpoint(tmp_path, SMALL)
    torch.set_num_threads(1)
    workloads = [TokenLoad(name="2 x (40 -> 5)", num_requests=2, input_len=40, output_len=5)]
    rounds = [*on_baton(tmp_path, workloads, 2), [EngineRun(seconds=1e6, cpu_s=1e6, ttft_s=[1e6])]]
    (best,) = figures_of("baton", "small", ModelCosts.of(read_config(tmp_path)), workloads, rounds, MACHINE)
    assert 0 < best.ttft_s <= best.prefill_s < best.seconds < 1e6
    assert best.output_tokens_per_s == pytest.approx(10 / best.seconds)
    assert best.tokens_per_s == pytest.approx(90 / best.seconds)
    draw([best], {"small": ModelCosts.of(read_config(tmp_path))}, MACHINE, tmp_path / "figures.svg")
    assert (tmp_path / "figures.svg").read_text().count("prompts of 2 x (40 -") == 1
    assert json.loads(json.dumps(record(best)))["share"] == pytest.approx(best.floor_s / best.cpu_s)


def test_figures_name_the_machine_and_how_to_take_them_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/transfer/moving.py", "--json", "figures.json", "--max-tokens", "30"])
    figures = {"1 x 64 tokens": {"median": 1.5, "longest": 9.0}, "4 x 64 tokens": {"median": 2.5}}
    write_bars(figures, unit="ms", json_file=tmp_path / "figures.json", plot=tmp_path / "figures.svg")
    told = json.loads((tmp_path / "figures.json").read_text())
    assert told["figures"] == figures
    assert told["command"] == "python -m benchmarks.transfer.moving --max-tokens 30"
    assert told["hardware"]["num_cores"] >= 1
    assert "torch" in told["versions"]
    assert told["hardware"]["cpu"] in (tmp_path / "figures.svg").read_text()
