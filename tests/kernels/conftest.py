"""Where kernels run and how close they must come: interpreted on a CPU, compiled on a GPU, always against float64."""

from __future__ import annotations

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

# The interpreter multiplies matrices of bfloat16 wrongly: there, float16 stands for the narrow types.
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if ON_GPU else (torch.float32, torch.float16)

# A few units in the last place of the result; weights of the softmax are rounded to the type once more.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers on the device, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def assert_near(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """`exact` is the float64 result."""
    tolerance = TOLERANCES[ours.dtype]
    torch.testing.assert_close(ours.double().cpu(), exact.double().cpu(), rtol=tolerance, atol=tolerance)
