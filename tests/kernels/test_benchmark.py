"""The benchmark of the kernels refuses cleanly without a GPU, and each of its cases can be launched."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.gpu_cases import attention_cases, other_cases
from tests.kernels.conftest import DEVICE, ON_GPU


def test_every_case_launches_and_says_what_it_costs() -> None:
    """With a small part of its tokens. What it computes is proved elsewhere."""
    cases = [*attention_cases(DEVICE, divisor=512), *other_cases(DEVICE, divisor=512)]
    assert {case.kernel for case in cases} >= {"paged_decode", "prefill", "rope_kv_write", "add_rms_norm", "draw"}
    for case in cases:
        case.launch()
        assert case.num_bytes > 0


@pytest.mark.skipif(ON_GPU, reason="there is a GPU")
def test_without_a_gpu_it_says_so(pytestconfig: pytest.Config) -> None:
    program = [sys.executable, "benchmarks/gpu_kernels.py"]
    result = subprocess.run(program, cwd=pytestconfig.rootpath, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "torch sees none: nothing was measured" in result.stderr
    assert not result.stdout
