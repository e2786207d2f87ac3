"""Each shape of the deployment, rendered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.deploy.rendering import SHAPES, Rendered, render


@pytest.fixture(params=sorted(SHAPES))
def shape(request: pytest.FixtureRequest) -> Rendered:
    """Each shape of the deployment in turn."""
    return render(SHAPES[request.param])


@pytest.fixture
def rendered() -> Callable[[str], Rendered]:
    return lambda name: render(SHAPES[name])
