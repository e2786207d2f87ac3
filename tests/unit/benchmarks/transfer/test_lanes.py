"""The benchmark of lanes refuses cleanly without a GPU to measure, and runs dry on a CPU: over real lanes, by the way
that two processes take, with both ends in this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.transfer.lanes import main


def test_a_dry_run_goes_all_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    main(device="cpu", tiny=True, tokens_per_s=1000.0, as_json=file)
    told = json.loads(file.read_text())
    ways = {"gloo lane", "raw gloo", "shm lane", "memcpy"}
    assert {(row["way"], row["num_blocks"]) for row in told["throughput"]} == {(way, n) for way in ways for n in (1, 3)}
    assert all(row["seconds"] > 0 for row in told["throughput"] + told["setup"])
    assert [row["way"] for row in told["setup"]] == ["gloo lane", "shm lane"]
    assert "no figure of it means anything" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(device="cuda")
    assert "torch sees none: nothing was measured" in capsys.readouterr().err
