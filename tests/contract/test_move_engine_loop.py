"""Claims about moves, with the real engine loop behind the admin port; all but those that need a busy engine."""

from collections.abc import AsyncIterator

import pytest

pytest.register_assert_rewrite("support.move_cases")

from support import move_cases  # noqa: E402
from support.machines_bed import LocalBed, MachinesBed  # noqa: E402
from support.move_cases import engines as engines  # noqa: E402
from support.role_engine import LoopKeeper  # noqa: E402

_NEED_A_BUSY_ENGINE = {
    "test_a_busy_engine_is_waited_for_until_a_step_boundary",
    "test_past_the_deadline_it_goes_back_at_a_higher_epoch",
}
globals().update({name: getattr(move_cases, name) for name in move_cases.__all__ if name not in _NEED_A_BUSY_ENGINE})


@pytest.fixture
async def machines_bed() -> AsyncIterator[MachinesBed]:
    bed = LocalBed(LoopKeeper)
    yield bed
    await bed.close()
