"""Making torch's first calls of exp, log and the like exact.

oneMKL picks the code of each vector function on the function's first call. When that call runs on two threads at once,
one of them may use code of low accuracy (1e-4) for that one call, silently (pytorch issue 188792). A first call on one
element runs on one thread, and settles it for the life of the process. Token draws must be the same everywhere, so the
modules that depend on exact values settle the functions they use when they are imported.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def settle(*functions: Callable[[Tensor], Tensor]) -> None:
    for function in functions:
        function(torch.full((1,), 0.5))
