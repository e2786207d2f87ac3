"""The benchmarks for GPUs refuse cleanly without one, and run dry on a CPU from end to end."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from tests.kernels.conftest import ON_GPU

# Interpreted kernels take a quarter of a minute on an idle machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

EXPERTS = "", ", int4", ", int8", ", fp8 blocks"


def run(name: str, *options: str) -> Result:
    """In this process: importing torch takes as long as a dry run."""
    app = typer.Typer()
    app.command()(import_module(f"benchmarks.gpu.{name}").main)
    with torch.no_grad():
        return CliRunner().invoke(app, options)


@pytest.mark.parametrize("name", ["kernels", "engine", "quantised"])
def test_a_dry_run_goes_all_the_way(name: str, tmp_path: Path) -> None:
    """On a toy, on a CPU: the program is known to run before a GPU is there to spend time of."""
    files = tmp_path / "figures.json", tmp_path / "figures.svg"
    options = "--tiny", "--device", "cpu", "--json", str(files[0]), "--plot", str(files[1])
    result = run(name, *options)
    assert result.exit_code == 0, result.output
    told = json.loads(files[0].read_text())
    assert all(figure["seconds"] > 0 and figure["floor_s"] > 0 for figure in told["figures"])
    assert "no figure of it means anything" in " ".join(result.stdout.split())
    assert files[1].stat().st_size > 0
    if name == "kernels":
        names = "paged_decode prefill rope_kv_write add_rms_norm silu_mul gelu_tanh_mul embed join draw gather".split()
        names += ["scatter", "latent_decode", "latent_prefill", *("experts" + kind for kind in EXPERTS)]
        names += [f"{attention}, {kind} KV" for attention in ("paged_decode", "prefill") for kind in ("int8", "fp8")]
        assert {figure["kernel"] for figure in told["figures"]} == set(names)
    elif name == "quantised":
        assert {figure["format"] for figure in told["figures"]} == {
            "W4A16",
            "W8A16",
            "Q4_K",
            "W8A8",
            "FP8",
            "FP8 blocks",
        }
    else:
        assert [row["engine"] for row in told["served"]] == ["baton", "transformers"]


@pytest.mark.skipif(ON_GPU, reason="there is a GPU")
@pytest.mark.parametrize("name", ["kernels", "engine", "quantised"])
def test_without_a_gpu_it_says_so(name: str) -> None:
    result = run(name)
    assert result.exit_code == 2
    assert "torch sees none: nothing was measured" in result.stderr
    assert not result.stdout
