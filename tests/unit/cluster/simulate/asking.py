"""`baton simulate` as from a shell, for tests."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from cluster.cli.main import make_app

SMALL = ("--requests", "30", "--rate", "10", "--input-len", "50:400", "--output-len", "5:40")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(["simulate"]), ["simulate", *arguments])


def answer(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout
