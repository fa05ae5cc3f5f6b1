"""How long PyTorch's threads spin for each other before they sleep. Must be said before torch is imported.

GNU's OpenMP, which PyTorch's wheels bring, lets a thread that waits spin for milliseconds. On a machine of its own that
is fastest. Where anything else runs on the same cores, be it this process's event loop, its client or another machine's
pod, spinning takes the time that the awaited thread needs: with four programs to a core, a decode step of SmolLM2 on
two threads took 2,312 ms with that default, and 275 to 583 ms with limits of 1,000 to 20,000 rounds.
"""

import os
import sys
from collections.abc import MutableMapping

SPINS = 10_000  # some hundreds of microseconds: longer than the gaps between the products of a step
_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> bool:
    """False: the environment says otherwise, or it is too late."""
    if "torch" in sys.modules or any(setting in environment for setting in _SETTINGS):
        return False
    environment["GOMP_SPINCOUNT"] = str(SPINS)
    return True
