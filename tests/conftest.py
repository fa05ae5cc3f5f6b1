"""What all tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from poolwright.local.model import ensure_demo_model

pytest_plugins = ["testbed.plugin"]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The small real model, SmolLM2-135M-Instruct, as a GGUF file; downloaded on first use."""
    return ensure_demo_model()


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """For modules of many tiny operations: on a busy machine two threads mostly wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
