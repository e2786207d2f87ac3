"""`baton simulate` as from a shell, for tests."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from cluster.cli.main import make_app

SMALL = ("workload.requests=30", "workload.rate=10", "workload.input_len=50:400", "workload.output_len=5:40")


def call(*arguments: str) -> Result:
    """Arguments such as workload.rate=10 are those of --set."""
    words = [word for argument in arguments for word in (("--set", argument) if "=" in argument else (argument,))]
    return CliRunner().invoke(make_app(["simulate"]), ["simulate", *words])


def answer(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout
