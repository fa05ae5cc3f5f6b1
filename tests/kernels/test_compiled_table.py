"""The tables of compiled kernels that are checked in: of these kernels, without a fault, and how far complete."""

import dataclasses
from pathlib import Path

import pytest

from poolwright_kernels.ahead_of_time import TARGETS, Compiled
from poolwright_kernels.attention_cases import ahead_of_time_cases
from poolwright_kernels.compiled_table import (
    MOST_GROUPED,
    NAMED_SPILLS,
    PATHS,
    TRITON_VERSIONS,
    Key,
    current_rows,
    digest_of,
    family_of,
    faults,
    keys,
    read_table,
    write_table,
)
from poolwright_kernels.inspect import Cache, CompilationFailed, Worker, compile_missing, telling_first
from poolwright_kernels.machine_code import Loop

INSTALLED = "3.7.1"  # the version in the environment of tests: needs no download
# Rows that a table may lack: what they would say is not proven. Lowered as they are compiled, to none.
UNPROVEN_ROWS = {"operations": 0, "attention": 0}


def rows_of(family: str) -> dict[Key, Compiled]:
    return {key: row for key, (_, row) in read_table(PATHS[family]).items()}


@pytest.mark.parametrize("family", PATHS)
def test_every_row_is_of_these_kernels(family: str) -> None:
    stale = rows_of(family).keys() - current_rows(family, PATHS[family]).keys()
    assert stale == set(), f"run `python -m poolwright_kernels.inspect --compile --table {family}`"


@pytest.mark.parametrize("family", PATHS)
def test_no_row_has_a_fault(family: str) -> None:
    assert {key: found for key, row in rows_of(family).items() if (found := faults(key, row))} == {}


@pytest.mark.parametrize("family", PATHS)
def test_no_row_is_missing(family: str) -> None:
    every = keys(family)
    missing = set(every) - rows_of(family).keys()
    assert len(missing) == UNPROVEN_ROWS[family]
    if missing:
        pytest.xfail(f"{len(missing)} of {len(every)} compiled rows of {family} are unproven")


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8e4nv"])
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_one_row_is_of_every_group(head_size: int, kv_dtype: str) -> None:
    """What decides a compilation is the same for all groups that a small tile holds: one binary serves them."""
    for target in TARGETS:
        digests = [
            [
                digest_of(case, INSTALLED, target)
                for case in ahead_of_time_cases(head_size, group, target, "bf16", kv_dtype)
            ]
            for group in (*range(1, 9), MOST_GROUPED)
        ]
        assert len(digests[0]) == 4
        assert all(each == digests[0] for each in digests)


def test_only_the_target_of_workstations_may_spill() -> None:
    assert {target for _, _, target in NAMED_SPILLS} <= {120}
    assert NAMED_SPILLS.keys() <= set(keys())


@pytest.mark.parametrize(
    "key",
    [
        ("rms norm 4096 add bf16", INSTALLED, 90),
        ("attention decode 128 bf16", INSTALLED, 80),
        ("attention mixed 64 fp16 window", INSTALLED, 90),
    ],
    ids=lambda key: " ".join(map(str, key)),
)
def test_compiled_anew_a_row_is_the_same(key: Key, tmp_path: Path) -> None:
    assert key[1] in TRITON_VERSIONS
    cache = Cache(tmp_path / "cache.jsonl")
    compiled = compile_missing([key], cache)
    assert faults(key, compiled[key]) == []
    assert compiled[key] == rows_of(family_of(key[0]))[key]
    assert Cache(tmp_path / "cache.jsonl").rows == cache.rows


@pytest.mark.parametrize("family", PATHS)
def test_a_table_survives_its_file(family: str, tmp_path: Path) -> None:
    write_table(family, rows_of(family), tmp_path / "table.json")
    assert (tmp_path / "table.json").read_text() == PATHS[family].read_text()


def test_a_row_that_is_older_than_its_kernel_does_not_count_and_the_others_do(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    rows = rows_of("operations")
    old, kept = ("bias logits", INSTALLED, 90), ("bias logits", INSTALLED, 80)
    write_table("operations", {key: rows[key] for key in (old, kept)}, path)
    digest = read_table(path)[old][0]
    path.write_text(path.read_text().replace(digest, "0" * len(digest)))
    assert current_rows("operations", path) == {kept: rows[kept]}


def test_what_is_cut_short_has_seen_every_head_format_target_and_triton() -> None:
    """Of attention's launches of two loops, in the first half of them."""
    begun = telling_first(keys("attention"))[:198]
    seen = {(word, version, target) for name, version, target in begun for word in name.split()[2:]}
    heads = {name.split()[2] for name, _, _ in begun}
    assert all(name.startswith("attention mixed") for name, _, _ in begun)
    assert heads == {"64", "96", "128", "256"}
    assert {(word, version, target) for word in ("bf16", "fp16", "fp8-kv", "window", "soft-cap")
            for version in TRITON_VERSIONS for target in (90, 100, 120)} <= seen  # fmt: skip


def test_when_the_time_is_over_nothing_more_is_compiled(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache.jsonl")
    assert compile_missing([key for key in keys() if key[1] == INSTALLED], cache, minutes=0) == {}


def test_each_rule_finds_what_breaks_it() -> None:
    mixed = ("attention mixed 128 bf16", INSTALLED, 90)
    large = Loop(400, (("wgmma", 12),), asynchronous_copies=9, loads=0, spills=0)
    small = dataclasses.replace(large, matrix=(("mma", 16),))
    row = Compiled(200, 0, 0, 98560, 0, 1, 128, 128, (large, large, small))
    assert faults(mixed, row) == []
    for broken, words in (
        ({"stack_bytes": 8}, "8 B of registers spilled"),
        ({"spills": 1}, "spilled"),
        ({"occupancy": 0}, "does not fit"),
        ({"loops": (large, small)}, "2 loops over tiles, not 2 + 1"),
        ({"loops": (large, small, small)}, "loop 2 multiplies by mma, not wgmma"),
        ({"loops": (large, large, large)}, "loop 3 multiplies by wgmma, not mma"),
        ({"loops": (large, large, dataclasses.replace(small, asynchronous_copies=0))}, "loop 3 copies nothing"),
    ):
        assert any(words in fault for fault in faults(mixed, dataclasses.replace(row, **broken))), words
    spilled = dataclasses.replace(large, spills=1)
    assert faults(mixed, dataclasses.replace(row, loops=(large, spilled, small))) == ["a loop spills"]
    crowded = ("attention mixed 256 bf16 window", INSTALLED, 100)  # its large tiles have one loop, not three
    tensor = dataclasses.replace(large, matrix=(("tcgen05", 18),))
    assert faults(crowded, dataclasses.replace(row, loops=(tensor, small))) == []
    assert (
        "3 loops over tiles, not 1 + 1" in faults(crowded, dataclasses.replace(row, loops=(tensor, tensor, small)))[0]
    )
    norm = ("rms norm 4096 add bf16", INSTALLED, 90)
    assert faults(norm, dataclasses.replace(row, loops=())) == []
    assert "loads of 32" in faults(norm, dataclasses.replace(row, loops=(), widest_load_bits=32))[0]


def test_sm_80_refuses_eight_bit_caches() -> None:
    """Why rows with an fp8 cache have no sm_80."""
    worker = Worker(INSTALLED)
    try:
        with pytest.raises(CompilationFailed, match="fp8e4nv"):
            worker.compile(("attention decode 64 bf16 fp8-kv", INSTALLED, 80))
    finally:
        worker.close()
