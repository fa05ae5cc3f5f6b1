"""Machines without Kubernetes: the same test-and-set as pods have, a watch, and records that outlive the process."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from poolwright.core.machine import Machine, begin, finish
from poolwright.core.router_note import RouterNote
from poolwright.local.machines import LocalMachines
from poolwright.machines import Conflict
from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost

MACHINE = Machine(
    name="a",
    uid="uid-a",
    machine_class="small",
    host="127.0.0.1",
    ready=True,
    role=Role.TOKEN,
    role_epoch=4,
    role_since=1.5,
    move=None,
    created_at=1.0,
    admin_port=4321,
)
MOVED = begin(MACHINE, Role.PROMPT, now=10.0, deadline_seconds=30.0, reason="TTFTMissed")


@pytest.fixture
def machines() -> LocalMachines:
    made = LocalMachines()
    made.put(MACHINE)
    return made


async def test_a_patch_writes_what_it_says(machines: LocalMachines) -> None:
    moving = await machines.patch(MOVED)
    assert (moving.role, moving.role_epoch) == (None, 5)
    assert await machines.list() == (moving,)
    done = await machines.patch(finish(moving, now=12.0))
    assert (done.role, done.role_epoch, done.role_since, done.move) == (Role.PROMPT, 5, 12.0, None)


@pytest.mark.parametrize(
    "patch",
    [replace(MOVED, expected_epoch=3), replace(MOVED, uid="uid-b"), replace(MOVED, name="b")],
    ids=["another epoch", "another machine of this name", "gone"],
)
async def test_a_patch_of_anything_else_than_was_read_changes_nothing(machines: LocalMachines, patch: object) -> None:
    with pytest.raises(Conflict):
        await machines.patch(patch)  # type: ignore[arg-type]
    assert await machines.list() == (MACHINE,)


async def test_only_one_of_two_equal_patches_wins(machines: LocalMachines) -> None:
    await machines.patch(MOVED)
    with pytest.raises(Conflict):
        await machines.patch(MOVED)


async def test_a_note_is_written_beside_the_role_and_only_on_the_machine_it_is_for(machines: LocalMachines) -> None:
    note = RouterNote(MachineProfile(StepCost(0.02, 1e-4, 1e-8), StepCost(0.03, 2e-4, 2e-8), 2048, 256, 64))
    moving = await machines.patch(MOVED)
    await machines.annotate(MACHINE, note)  # as it was read before the move began
    assert await machines.list() == (replace(moving, note=note),)
    done = await machines.patch(finish(replace(moving, note=note), now=12.0))
    assert done.note == note
    for other in (replace(MACHINE, uid="uid-b"), replace(MACHINE, name="b")):
        with pytest.raises(Conflict):
            await machines.annotate(other, note)
    assert await machines.list() == (done,)


async def test_records_outlive_the_process(tmp_path: Path) -> None:
    file = tmp_path / "machines.json"
    first = LocalMachines(file)
    first.put(MACHINE)
    moving = await first.patch(MOVED)
    second = LocalMachines(file)
    assert await second.list() == (moving,)
    assert os.listdir(tmp_path) == [file.name]


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"name": "a"}]', '{"a": 1}'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "machines.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"machines\.json"):
        LocalMachines(file)


async def test_a_watch_begins_with_all_and_skips_to_the_latest(machines: LocalMachines) -> None:
    watch = machines.watch()
    assert await anext(watch) == (MACHINE,)
    machines.observe("a", ready=False)
    machines.observe("a", ready=True)
    machines.observe("a", ready=False)
    [seen] = await anext(watch)
    assert seen.ready is False
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(watch), 0.02)
    await watch.aclose()  # type: ignore[attr-defined]


async def test_seeing_the_same_again_wakes_nobody(machines: LocalMachines) -> None:
    watch = machines.watch()
    await anext(watch)
    machines.observe("a", ready=True)
    machines.remove("unknown")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(watch), 0.02)
    machines.remove("a")
    assert machines.observe("a", ready=True) is None
