"""Settings of `baton serve` that a simulation has no use for: they exist, and are told of."""

from __future__ import annotations

from typer.testing import CliRunner

from cluster.cli.main import make_app
from cluster.config.declared import declared_settings, tables
from cluster.simulate.run.config import WITHOUT_EFFECT


def told(*further: str) -> str:
    few = "simulate", "--requests", "2", "--input-len", "50", "--output-len", "5"
    result = CliRunner().invoke(make_app(["simulate"]), [*few, *(word for one in further for word in ("--set", one))])
    assert result.exit_code == 0, result.output
    return result.stderr


def test_settings_that_change_nothing_are_named_in_one_line() -> None:
    given = "port=9", 'worker.device="cpu"', "worker.max_num_seqs=8", "lanes={stall_s=9,checksum=true}", "port=10"
    lines = [line for line in told(*given).splitlines() if "no effect" in line]
    assert lines == ["no effect in a simulation: --set port, worker.device, lanes.stall_s, lanes.checksum"]


def test_nothing_is_said_of_settings_that_count() -> None:
    assert "no effect" not in told("worker.max_num_seqs=8", 'index="redis://any"')


def test_only_settings_that_exist_are_known_to_have_none() -> None:
    assert {*declared_settings(), *tables()} >= WITHOUT_EFFECT
