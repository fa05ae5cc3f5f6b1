"""What all tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before any import of a kernel: Triton asks when a kernel is defined, and one process cannot mix the two. Without a GPU
# nothing but the interpreter can run a kernel; a run on a GPU says TRITON_INTERPRET=0.
os.environ.setdefault("TRITON_INTERPRET", "1")

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
