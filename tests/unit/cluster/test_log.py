"""What a verb says on stdout while it serves: whoever reads that may go, and the verb goes on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from cluster.log import ResultConsole
for _ in range(2):
    ResultConsole().say("[bold]demo[/] at http://127.0.0.1:8000, and " + 200 * "more, ")
print("serves", file=sys.stderr)
"""


def test_on_a_pipe_it_is_one_plain_line() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    told = "demo at http://127.0.0.1:8000, and " + 200 * "more, "
    assert done.stdout.splitlines() == [told, told]


@pytest.mark.parametrize("stdout", ["a pipe that nobody reads", "a full disk", "none"])
def test_that_it_cannot_be_said_ends_nothing(stdout: str) -> None:
    command = [sys.executable, "-c", PROGRAM]
    if stdout == "none":
        command = ["sh", "-c", 'exec "$0" "$@" >&-', *command]
    with open(_nowhere() if stdout == "a pipe that nobody reads" else "/dev/full", "w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "serves\n")


def _nowhere() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing
