"""Every `baton` command that these pages show is understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from cluster.cli.main import make_app

ROOT = Path(__file__).resolve().parents[4]
PAGES = {
    "README.md",
    *(f"docs/{name}.md" for name in ("benchmarking", "kubernetes", "models", "quickstart", "simulation")),
}
SHOWN = [
    (page, line)
    for page in sorted(PAGES)
    for block in re.findall(r"^```\w*\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith("baton ")
]


def test_there_are_some() -> None:
    assert {page for page, _ in SHOWN} >= {*PAGES} - {"README.md"}


@pytest.mark.parametrize(("page", "line"), SHOWN)
def test_a_shown_command_is_understood(page: str, line: str) -> None:
    _, verb, *flags = shlex.split(line, comments=True)
    group = typer.main.get_command(make_app([verb]))
    command = group.get_command(typer.Context(group), verb)  # type: ignore[attr-defined]
    assert command is not None, f"{page}: there is no `baton {verb}`"
    command.make_context(verb, flags)  # raises for a flag that does not exist
