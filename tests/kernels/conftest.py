"""Kernels under Triton's interpreter (tests/conftest.py asks for it), on one thread."""

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def as_a_gpu_computes(one_torch_thread: None) -> Iterator[None]:
    """A GPU says nothing when a number overflows or an infinity meets another; NumPy, which interprets, would."""
    with np.errstate(all="ignore"):
        yield
