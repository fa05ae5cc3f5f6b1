"""Every claim about moves, on machines without Kubernetes."""

from collections.abc import AsyncIterator

import pytest

pytest.register_assert_rewrite("support.move_cases")

from support.machines_bed import LocalBed, MachinesBed  # noqa: E402
from support.move_cases import *  # noqa: E402, F403
from support.move_cases import engines as engines  # noqa: E402


@pytest.fixture
async def machines_bed() -> AsyncIterator[MachinesBed]:
    bed = LocalBed()
    yield bed
    await bed.close()
