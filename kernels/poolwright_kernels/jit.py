"""Triton where it is installed. A machine without it runs the references, and only a launch says what is missing.

Kernels are written as usual: `from poolwright_kernels.jit import tl, jit`. Triton decides when a kernel is defined
whether it is compiled or interpreted (TRITON_INTERPRET=1), so one process has one kind.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["available", "ceil_div", "jit", "jit_with_counts", "power_of_two_from", "tl"]

try:
    import triton
    import triton.language as tl

    available = True
except ImportError:  # PyTorch for the CPU comes without it
    available = False

    class _Absent:
        """Stands for any name of Triton's in the annotations and defaults of a kernel that will never run."""

        def __getattr__(self, name: str) -> "_Absent":
            return self

        def __getitem__(self, grid: object) -> Callable[..., Any]:
            raise RuntimeError("this operation on a GPU needs Triton, which is not installed")

        def __call__(self, *args: object, **options: object) -> "_Absent":
            return self

    triton = tl = _Absent()


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`."""
    return triton.jit(function)


def jit_with_counts(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """As `jit`; the named integers differ from step to step, and their values must not make new compilations."""

    def wrap(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(names))

    return wrap


def ceil_div(size: int, part: int) -> int:
    return -(-size // part)


def power_of_two_from(size: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (size - 1).bit_length()
