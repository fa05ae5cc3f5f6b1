"""How long PyTorch's threads spin for each other before they sleep. Must be said before torch is imported.

GNU's OpenMP, which PyTorch's wheels bring, lets a thread that waits spin for ever, nearly. Where other engines run on
the same cores, spinning takes the time that the awaited thread needs: with four programs to a core, a decode step of
SmolLM2 on two threads took 2,312 ms with that default, and 275 to 583 ms with limits of 1,000 to 20,000 rounds. On a
machine of its own a thread that sleeps between the products of a step comes late to the next one: a step of 8 decodes
took 85 ms with 10,000 rounds, 71 with a million and 72 without limit.
"""

import os
import sys
from collections.abc import MutableMapping

from poolwright_protocol import names

SPINS_OF_A_POOL = 10_000  # machines of a pool may share their cores
SPINS_ALONE = 1_000_000  # longer than what lies between the products of a step, shorter than what lies between requests
_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> bool:
    """False: the environment says otherwise, or it is too late."""
    if "torch" in sys.modules or any(setting in environment for setting in _SETTINGS):
        return False
    environment["GOMP_SPINCOUNT"] = str(SPINS_OF_A_POOL if names.ENV_ROLE in environment else SPINS_ALONE)
    return True
