"""A process with limits answers, and a request that takes too much ends it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.limited.limited_process import LimitedProcess, LimitedProcessEnded

SCRIPT = """
def make_answer():
    def answer(request):
        if request == b"loop":
            while True:
                pass
        if request == b"memory":
            try:
                bytearray(2 ** 33)
            except MemoryError:
                return b"no memory"
        return request.upper()
    return answer
"""


def test_a_request_that_takes_too_long_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = LimitedProcess(tmp_path / "script.py")
    assert process.ask(b"a", 1.0) == b"A"
    assert process.ask(b"memory", 1.0) == b"no memory"
    with pytest.raises(LimitedProcessEnded) as ended:
        process.ask(b"loop", 0.05)
    assert ended.value.took_too_long
    assert not ended.value.is_from_outside
