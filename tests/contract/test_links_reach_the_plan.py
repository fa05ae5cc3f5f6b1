"""From where machines stand to who is moved: through the operator's own look, and without a cluster."""

import json
from pathlib import Path
from typing import Any

import pytest

from poolwright.api.models import InferencePool
from poolwright.core.links import Place
from poolwright.core.machine import Machine
from poolwright.local.machines import LocalMachines, load
from poolwright.local.supervisor import LocalSettings, Supervisor
from poolwright_protocol import names
from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost
from support.standing_pool import Load, StandingPool, manifest, standing_pool

SLOW_PROMPTS = Load(4, ttft_seconds=5.0, tbt_seconds=0.02)
# 400 prompt tokens a second, 1 MB each: 0.4 GB/s of KV.
PROFILE = MachineProfile(StepCost(0.01, 1e-4, 1e-8), StepCost(0.012, 1e-3, 1e-8), 2048, 64, 64, 100_000, 1_000_000)


def stand(pool: StandingPool, places: dict[str, Place]) -> None:
    for name, place in places.items():
        pool.bed.machines.observe(name, place=place)


def last(pool: StandingPool) -> tuple[str, dict[str, str]]:
    decision = pool.status["decisions"][-1]
    return decision["reason"], {e["name"]: e["value"] for e in decision["evidence"]}


async def test_an_operator_moves_nobody_who_would_have_no_way_for_its_kv() -> None:
    async with standing_pool() as pool:
        stand(pool, {f"m{i}": Place(f"rack-{i}", None, 0.1e9) for i in range(3)})
        pool.bed.engine("m0").profile = PROFILE
        await pool.live(40, SLOW_PROMPTS)
        reason, evidence = last(pool)
        assert (reason, pool.split[Role.PROMPT]) == ("NoLink", 1)
        assert evidence["links"] == "0.4 GB/s of KV; 1 of 1 prompt machines have no way for it"


async def test_over_links_that_hold_it_the_same_machine_is_moved() -> None:
    async with standing_pool() as pool:
        stand(pool, {f"m{i}": Place(f"rack-{i}", None, 1e9) for i in range(3)})
        pool.bed.engine("m0").profile = PROFILE
        await pool.live(40, SLOW_PROMPTS)
        assert pool.split[Role.PROMPT] == 2


async def test_without_labels_nothing_is_said_of_links() -> None:
    async with standing_pool() as pool:
        await pool.live(40, SLOW_PROMPTS)
        assert "links" not in last(pool)[1]
        assert pool.split[Role.PROMPT] == 2


class _WithoutProcesses(Supervisor):
    async def _run_engine(self, name: str, engine: Any) -> None:
        return None


def _selecting(**labels: str) -> InferencePool:
    raw = manifest(2)
    selected = {f"{names.GROUP}/{key.replace('_', '-')}": value for key, value in labels.items()}
    raw["spec"]["machines"][0]["template"] = {"nodeSelector": selected}
    return InferencePool.model_validate(raw)


async def test_without_a_cluster_a_machines_node_carries_what_its_class_selects(tmp_path: Path) -> None:
    file = tmp_path / "machines.json"
    machines = LocalMachines(file)
    supervisor = _WithoutProcesses(machines, file, LocalSettings(tmp_path, bytes(32)))
    pool = _selecting(kv_island="rack-1", kv_outside_gbps="25")
    await supervisor._ensure_class(pool, pool.spec.machines[0])
    assert {m.place for m in await machines.list()} == {Place("rack-1", None, 25e9 / 8)}
    assert load(file) == {m.name: m for m in await machines.list()}, "as the router reads them"
    pool = _selecting(kv_island="rack-2")
    await supervisor._ensure_class(pool, pool.spec.machines[0])
    assert {m.place for m in await machines.list()} == {Place("rack-2")}
    broken = _selecting(kv_island="rack-1", kv_outside_gbps="fast")
    with pytest.raises(ValueError, match="kv-outside-gbps"):
        await supervisor._ensure_class(broken, broken.spec.machines[0])


def test_records_of_an_older_version_have_no_place() -> None:
    machine = Machine("a", "u", "c", None, True, Role.TOKEN, 1, 0.0, None, 0.0, place=Place("rack-1"))
    row = json.loads(json.dumps(machine.to_row()))
    assert Machine.from_row(row) == machine
    del row["place"]
    assert Machine.from_row(row).place is None
