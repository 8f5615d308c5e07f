"""The engines that several files test."""

from typing import TYPE_CHECKING

import pytest

from tests.support.tiny_models import LLAMA, QWEN

if TYPE_CHECKING:
    from gpu_backend.engine import Engine


@pytest.fixture(scope="module", params=[QWEN, LLAMA], ids=["qwen3", "llama"])
def engine(request: pytest.FixtureRequest) -> "Engine":
    """200 blocks of 4 tokens; its texts stay from test to test, until somebody resets it."""
    from gpu_backend.engine import Engine  # needs torch

    return Engine(request.param, 200, 4, seed=1)
