"""The simulator beside two real engine processes and the real router, for seconds. `make bench-agreement` is the whole.

A shared machine may be anything from idle to overloaded, so nothing here is a speed, and the tolerance grows with what
the real runs differ by among themselves.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.policy_agreement import many_engines
from bench.policy_agreement.store import Store

# It waits for a share of the cores as everybody does: half a minute alone, minutes beside many others.
pytestmark = [pytest.mark.long, pytest.mark.model, pytest.mark.timeout(400)]
TOLERANCE = 0.25
OF_SPREAD = 3.0


async def test_a_split_pool_and_its_simulation_agree(tmp_path: Path) -> None:
    said: list[str] = []
    store = Store(tmp_path / "agreement.json", keep=False)
    section = await many_engines.run(store, many_engines.short(), 2, said.append)
    assert len(section["repeats"]) == 2
    found = {(row["measure"], row["percent"]): row for row in section["rows"]}
    for key in (("ttft", 50), ("ttft", 90), ("tbt", 50), ("tbt", 90)):
        row = found[key]
        assert abs(row["error"]) <= max(TOLERANCE, OF_SPREAD * row["spread"]), (row, section["ways"])
    again = await many_engines.run(Store(store.file, keep=True), many_engines.short(), 2, said.append)
    assert again["rows"] == section["rows"]  # nothing was measured anew: the simulator says the same each time
