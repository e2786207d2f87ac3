"""What a user of `baton simulate` gets told of flags that ask for what there is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import make_app
from protos.errors import Misconfigured


def test_a_trace_with_fewer_requests_than_asked_for_is_told(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'
    file.write_text("".join(line % timestamp for timestamp in (0, 10, 20)))
    told = [
        CliRunner().invoke(make_app(["simulate"]), ["simulate", "--trace", str(file), "--requests", num]).stderr
        for num in ("5", "3")
    ]
    assert f"--requests 5: {file} has only 3\n" in told[0]
    assert "only" not in told[1]


def test_a_mistake_in_the_file_names_it(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("worker.tp = 0\n")
    result = CliRunner().invoke(make_app(["simulate"]), ["simulate", "--config", str(file)])
    assert isinstance(result.exception, Misconfigured)
    assert result.exception.message.startswith(f"--config {file}: worker.tp is 0: ")


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize("flag", ["--ttft-ms", "--tpot-ms"])
def test_an_objective_is_above_0(flag: str, value: str) -> None:
    result = CliRunner().invoke(make_app(["simulate"]), ["simulate", flag, value])
    assert isinstance(result.exception, Misconfigured)
    assert result.exception.message == f"{flag} {value}: give milliseconds, above 0"
