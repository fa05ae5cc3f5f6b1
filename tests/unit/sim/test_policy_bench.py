"""The comparison of policies: cells as the file says, runs once only, and verdicts that follow from the numbers."""

import ast
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from poolwright.api.models import Basis, Rebalance
from poolwright.sim.outcome import RequestOutcome, RunOutcome
from poolwright.sim.policy import Slo
from poolwright.sim.simulation import simulate
from poolwright.sim.traces import Copies
from poolwright_protocol.roles import Role

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench.policy import __main__ as command
from bench.policy import contenders, crew, estimate, full, page, parts, runs, schedule, source, studies, table, verdict
from bench.policy.cells import AS_IT_IS, Capacity, Cell, Twist, World, capacity, cells, slo, tuning, world
from bench.policy.known import Known
from bench.policy.runs import Cause, Kind, Result, Run, Search
from bench.policy.schedule import DEFAULT, QUICK, capacity_of, comparison, missing
from bench.policy.verdict import Standing, judge, paired, standing

ROOT = Path(__file__).parents[3]
CELL = "code-70b-n4"


@cache
def short(name: str = CELL, seconds: float = 60.0) -> Cell:
    return schedule.shortened(cells()[name], seconds)


@cache
def short_world(name: str = CELL, twist: Twist = AS_IT_IS) -> World:
    return world(short(name), capacity(short(name)), 1, twist=twist)


# ---------------------------------------------------------------------------------------------------------------- cells


def test_the_file_has_the_cells_that_a_comparison_needs() -> None:
    every = cells().values()
    assert len(every) == 24
    assert {cell.machines for cell in every} == {2, 4, 8, 40}
    assert {cell.cap for cell in every} == {1.5, 3, 5, None}
    assert {cell.trace for cell in every} == {"azure-code", "azure-conversation", "mooncake-conversation"}
    assert {cell.machine.split("-")[2] for cell in every} == {"70b", "8b"}
    assert {cell.machine.split("-")[0] for cell in every} == {"a100", "h100", "h200"}
    changed = [(c.other, c.start, c.burst, c.lost, c.flood) for c in every if c.changes]
    assert all(any(row[kind] is not None for row in changed) for kind in range(5))
    assert all(cell.seconds == 600 for cell in every if not cell.changes and cell.machines < 40)
    assert all(cell.slice != tuning()[0] for cell in every)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("cap: 3", "nine"),
        ("color: red", "color"),
        ("trace: nowhere", "nowhere"),
        ("machine: a100-opt-66b-tp4", "a100-opt-66b-tp4"),
        ("start: 4", "first split"),
        ("lost: {machine: 4, at_seconds: 1}", "machine 4"),
    ],
)
def test_a_cell_that_makes_no_sense_is_refused_by_name(tmp_path: Path, given: str, said: str) -> None:
    file = tmp_path / "cells.yaml"
    key, _, value = given.partition(": ")
    rest = {"trace": "azure-code", "slice": "1", "machine": "a100-llama-70b-tp4", "machines": "4", "share": "0.7"}
    rest |= {"cap": "3"} if key != "cap" else {"cap": "3", "nine": "true", "reference": "a100-llama-70b-tp4"}
    rest |= {key: value}
    lines = "".join(f"    {name}: {text}\n" for name, text in rest.items())
    file.write_text(f"defaults:\n  seconds: 600\n  ttft: 5\ncells:\n  odd:\n{lines}")
    with pytest.raises(ValueError, match=f"cell odd.*{said}"):
        cells(file)


def test_the_rate_is_the_share_of_what_the_bound_allows() -> None:
    cell = short(seconds=300.0)
    able = capacity(cell)
    trace = world(cell, able, 1).trace
    assert len(trace) / cell.seconds == pytest.approx(cell.share * able.requests_per_second[0], rel=0.03)


def test_a_draw_is_another_choice_of_the_same_traffic() -> None:
    cell, able = short(), capacity(short())
    first, again, second = (world(cell, able, seed).trace for seed in (1, 1, 2))
    assert first.requests == again.requests != second.requests
    shuffled = world(cell, able, 1, Copies.SHUFFLED).trace
    assert len(shuffled) == pytest.approx(len(first), rel=0.1)
    assert shuffled.requests != first.requests


def test_beliefs_change_what_is_told_and_not_what_is() -> None:
    plain, twisted = short_world(), short_world(twist=Twist(profile=1.2, bandwidth=0.1, forecast=2.0))
    assert twisted.conditions.models == plain.conditions.models
    assert twisted.conditions.network == plain.conditions.network
    assert twisted.trace.requests == plain.trace.requests
    told, was = twisted.setting, plain.setting
    assert told.network_bytes_per_second == pytest.approx(0.1 * was.network_bytes_per_second)
    assert told.expected_output_tokens == pytest.approx(2 * was.expected_output_tokens)
    steps = [setting.machines[0].step_time for setting in (told, was)]
    assert steps[0].seconds((), 4, 4000) == pytest.approx(1.2 * steps[1].seconds((), 4, 4000))
    taken = [time.decode_run(4, 4000, 1.2 * factor, 1000) for time, factor in zip(steps, (1.2, 1.0), strict=True)]
    assert taken[0][0] == taken[1][0]
    assert taken[0][1] == pytest.approx(1.2 * taken[1][1])


def test_policies_without_a_growing_target_are_told_that_of_the_mean_prompt() -> None:
    where = short_world("mooncake-70b-h100-n4")
    slo_, told = where.setting.slo, where.told.slo
    mean = where.setting.expected_prompt_tokens
    assert told.ttft_seconds == pytest.approx(slo_.ttft_seconds + slo_.ttft_seconds_per_token * mean)
    assert told.ttft_seconds_per_token == 0


# ------------------------------------------------------------------------------------------------------------- policies


def test_every_policy_has_a_name_and_starts_where_the_cell_says() -> None:
    where = short_world("wrong-split-70b-n8")
    for name in (*contenders.PUBLISHED, "ours", "static:2/5/1"):
        policy, told = contenders.policy_of(name, where)
        roles = list(policy.first_roles(told))
        assert len(roles) == 8
        if name not in (*contenders.WITHOUT_POOLS, "distserve", "static:2/5/1", "tokenscale"):
            assert roles.count(Role.PROMPT) == where.cell.start, name
    roles = list(contenders.policy_of("static:2/5/1", where)[0].first_roles(where.setting))
    assert [roles.count(role) for role in (Role.PROMPT, Role.TOKEN, Role.MIXED)] == [2, 5, 1]


def test_options_are_taken_as_they_are_written() -> None:
    options = contenders.our_options("ours:moves=off,interval_seconds=30,return_rule=idle,admission=on")
    assert (options.moves, options.admission, options.interval_seconds) == (False, True, 30.0)
    assert options.return_rule.name == "IDLE"
    assert contenders.policy_of("sarathi:budget=512", short_world())[0].parameters["budget"] == 512
    assert (
        contenders.policy_of("arrow:expand=1.2,prompt=3", short_world())[0]
        .first_roles(short_world().setting)
        .count(Role.PROMPT)
        == 3
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nobody", "nobody"),
        ("ours:speed=9", "speed"),
        ("ours:moves=7", "moves"),
        ("ours:moves", "key=value"),
        ("ours:interval_seconds=soon", "soon"),
        ("ours:return_rule=never", "return_rule"),
        ("static:1/1", "4 machines"),
        ("static:a/b", "PROMPT/TOKEN/MIXED"),
        ("static:4/0", "answers"),
        ("static:0/4", "prompts"),
        ("mooncake:up=3", "only"),
        ("keda:up=3", "up"),
        ("keda:router=theirs", "router is ours or queue"),
        ("distserve:parallelism=none", "phase or same"),
        ("ours:without=luck", "no part"),
        ("ours-as-shipped:moves=off", "as it is"),
        ("held:1/1", "4 machines"),
        ("sarathi:speed=3", "speed"),
        ("vllm+late", "late"),
    ],
)
def test_a_name_that_is_none_is_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        contenders.policy_of(name, short_world())


def imports_of(module: str) -> set[str]:
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += source._read(name)[1]
    return seen


def test_as_shipped_has_what_a_pool_has() -> None:
    """When a deployed pool learns one of these, the row has to learn it too."""
    shipped = contenders.SHIPPED["ours-as-shipped-by-work"]
    assert shipped.affinity is ("poolwright.core.affinity" in imports_of("poolwright.router.exchange"))
    assert shipped.live is ("poolwright.core.live_work" in imports_of("poolwright.controller.app"))
    options = (ROOT / "operator/poolwright/controller/render.py").read_text()
    assert shipped.slack_budget is ("--tbt-target-ms" in options)
    assert shipped.quick_first_tokens is False
    assert contenders.SHIPPED["ours-as-shipped"] == replace(shipped, priced=False, relegate=False, live=False)
    basis = next(f for f in Rebalance.model_fields.items() if f[0] == "basis")[1].default
    assert basis is Basis.LATENCY


# -------------------------------------------------------------------------------------------------------------- one run


def outcome(
    number: int, first: float | None, gap: float, refused: str | None = None, ends: bool = True
) -> RequestOutcome:
    gaps = ((gap, 9),) if first is not None else ()
    finished = first + 9 * gap if first is not None and ends else None
    return RequestOutcome(number, 0.0, 100, 10, first, finished, gaps, refused)


@pytest.mark.parametrize(
    ("request_", "cause"),
    [
        (outcome(0, 0.5, 0.05), None),
        (outcome(1, 1.5, 0.05), Cause.LATE_FIRST),
        (outcome(2, 0.5, 0.2), Cause.LATE_GAPS),
        (outcome(3, None, 0.0, "TTFT would be missed"), Cause.REFUSED),
        (outcome(4, None, 0.0), Cause.LOST),
        (outcome(5, 0.5, 0.05, ends=False), Cause.LOST),
    ],
)
def test_what_did_not_attain_has_one_cause(request_: RequestOutcome, cause: Cause | None) -> None:
    assert runs.cause_of(request_, Slo(1.0, 0.1)) is cause


def test_causes_add_up_to_what_was_missed() -> None:
    where = short_world("flood-70b-n4")
    policy, told = contenders.policy_of("ours", where)
    found = runs.judged(simulate(policy, where.trace, told, where.conditions), where)
    assert found.value is not None
    assert found.value + sum(found.causes.values()) == pytest.approx(1.0)
    assert found.requests == len(where.trace)


def test_nine_percentiles_are_worth_the_inverse_of_the_worst() -> None:
    where = short_world("code-nine-70b-n4")
    slow = RunOutcome("slow", "", 1, [outcome(n, 100.0, 10.0) for n in range(10)], [], 60.0, 1)
    found = runs.judged(slow, where)
    assert found.value == pytest.approx(1 / (found.figures["stress"] or math.inf))
    assert found.value is not None
    assert found.value < 0.1


def test_a_run_that_cannot_be_says_why() -> None:
    cell = short()
    run = Run(Kind.POLICY, cell, "static:9/9", seed=1, able=capacity(cell))
    found = runs.perform(run)
    assert found.value is None
    assert "4 machines" in found.note


def test_a_run_that_takes_too_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MOST_SECONDS", -1.0)
    found = runs.perform(Run(Kind.POLICY, short(), "vllm", seed=1, able=capacity(short())))
    assert found.value is None
    assert "took more than" in found.note


# ----------------------------------------------------------------------------------------------------------------- keys


def test_a_key_follows_the_inputs_and_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("import poolwright.b\n")
    (tmp_path / "b.py").write_text("x = 1  # one\n")
    (tmp_path / "c.py").write_text("y = 1\n")
    monkeypatch.setattr(source, "PACKAGES", {"poolwright": tmp_path})

    def digest() -> str:
        source._read.cache_clear()
        return source.digest(["poolwright.a"])

    try:
        before = digest()
        (tmp_path / "b.py").write_text("# another word\nx = 1\n")
        (tmp_path / "c.py").write_text("y = 2\n")
        assert digest() == before
        (tmp_path / "b.py").write_text("x = 2\n")
        assert digest() != before
    finally:
        source._read.cache_clear()


def test_published_policies_do_not_depend_on_ours() -> None:
    names = ("narwhal", "ours", "keda", "keda:router=queue", "ours-as-shipped", "held:2/2/0", "static:2/2/0")
    assert [contenders.uses_ours(name) for name in names] == [False, True, True, False, True, True, False]
    assert len({runs.key(replace(RUN, policy=name)) for name in names}) == len(names)
    assert runs.sources(True) != runs.sources(False)
    reached = {"poolwright.sim.ours"}
    waiting, seen = list(runs._SHARED), set()
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += source._read(module)[1]
    assert not reached & seen
    assert {"poolwright.sim.counting", "poolwright.sim.baselines.keda"} <= seen


RUN = Run(Kind.POLICY, short(), "vllm", seed=1, able=Capacity((10.0,), 0.5))


@pytest.mark.parametrize(
    "other",
    [
        replace(RUN, seed=2),
        replace(RUN, policy="orca"),
        replace(RUN, copies=Copies.SHUFFLED),
        replace(RUN, twist=Twist(forecast=2.0)),
        replace(RUN, cell=replace(RUN.cell, share=RUN.cell.share / 2)),
        replace(RUN, able=Capacity((11.0,), 0.5)),
    ],
)
def test_other_inputs_are_other_runs(other: Run) -> None:
    assert runs.key(other) != runs.key(RUN)
    assert runs.key(replace(RUN, cell=replace(RUN.cell, quick=not RUN.cell.quick))) == runs.key(RUN)


# ------------------------------------------------------------------------------------------------------------- schedule


def made_up(value: Callable[[Run], float]) -> Callable[[Run], Result]:
    able = {"requests_per_second": [10.0], "prompt_share": 0.5}
    causes = {Cause.LATE_GAPS.value: 0.2}

    def found(run: Run) -> Result:
        if run.kind is Kind.CAPACITY:
            return Result(10.0, able=able)
        return Result(1.0 if run.kind is Kind.BOUND else value(run), requests=100, causes=causes)

    return found


def played(cell: Cell, known: Known, value: Callable[[Run], float], effort: schedule.Effort = DEFAULT) -> list[Run]:
    """All runs that a comparison asks for, each answered by `value`."""
    done: list[Run] = []
    found = made_up(value)
    while (left := missing(comparison(cell, known, effort), known)) is not None:
        for run in dict.fromkeys(left[1]):
            known.keep(run, found(run))
            done.append(run)
        assert len(done) < 2000
    return done


def worth(run: Run) -> float:
    base = contenders.parts(run.policy)[0] if run.kind is Kind.POLICY else "clairvoyant"
    wobble = 0.001 * run.seed
    if run.kind is Kind.POLICY and contenders.is_split(run.policy):
        prompt = contenders.split_of(run.policy, run.cell)[0]
        return 0.9 - 0.05 * abs(prompt - 3) + wobble
    return {"ours": 0.9, "narwhal": 0.92, "arrow": 0.89, "clairvoyant": 0.95}.get(base, 0.5) + wobble


@pytest.mark.parametrize("name", [CELL, "swing-70b-n8-loose", "code-70b-n40", "flood-70b-n4", "code-nine-70b-n4"])
def test_a_comparison_ends_and_runs_nothing_twice(tmp_path: Path, name: str) -> None:
    cell = cells()[name]
    done = played(cell, Known(tmp_path), worth)
    assert len(done) == len(set(done))
    seeds = {run.seed for run in done if run.policy == "ours" and run.copies is Copies.JITTERED}
    assert seeds == {1, 2, 3, 4, 5}
    assert {run.policy for run in done} >= set(DEFAULT.policies)
    # And from the file alone, nothing is left to do.
    assert missing(comparison(cell, Known(tmp_path), DEFAULT), Known(tmp_path)) is None


def test_what_is_far_behind_is_drawn_once_and_rivals_five_times(tmp_path: Path) -> None:
    done = played(cells()[CELL], Known(tmp_path), worth)
    plain = [run for run in done if run.copies is Copies.JITTERED and not run.twist.knows]
    plain = [run for run in plain if run.cell.seconds == 600 or run.policy == "vllm"]
    draws = {name: sum(run.policy == name for run in plain) for name in ("vllm", "narwhal", "arrow")}
    assert draws == {"vllm": 1, "narwhal": 5, "arrow": 5}
    # The one draw of what is far behind is its first part.
    assert [run.cell.seconds for run in plain if run.policy == "vllm"] == [150.0]


def test_who_is_far_behind_in_part_is_not_run_to_its_end_and_shown_so(tmp_path: Path) -> None:
    cell, known = cells()["burst-8b-n4"], Known(tmp_path)
    done = played(cell, known, worth)
    assert {run.cell.seconds for run in done if run.policy == "vllm"} == {200.0}
    (part,) = {run.cell for run in done if run.policy == "vllm"}
    assert part.burst is not None
    assert part.burst.at_seconds == pytest.approx(200 / 3)
    found = judge(cell, known, DEFAULT)
    assert found is not None
    row = next(row for row in found.rows if row.policy == "vllm")
    assert (row.standing, row.value, row.in_part) == (Standing.IN_PART, None, pytest.approx(0.501))
    assert "0.501 in part" in "\n".join(table.cell_lines(found))
    assert "not drawn yet" not in found.verdict
    ours_in_part = next(run for run in done if run.policy == "ours" and run.cell == part)
    known.keep(ours_in_part, Result(0.55))
    # Without that distance it has to be run.
    later = judge(cell, known, DEFAULT)
    assert later is not None
    assert next(row for row in later.rows if row.policy == "vllm").standing is Standing.OPEN


def test_the_full_comparison_runs_everybody_to_the_end(tmp_path: Path) -> None:
    done = played(cells()["code-70b-n2"], Known(tmp_path), worth, schedule.FULL)
    assert {run.cell.seconds for run in done} == {600.0}
    assert sum(run.policy == "vllm" and run.copies is Copies.JITTERED and not run.twist.knows for run in done) == 5


@pytest.mark.parametrize("name", ["swing-70b-n8-loose", "code-70b-n40"])
def test_a_coarse_sweep_finds_the_best_split(tmp_path: Path, name: str) -> None:
    cell, known = cells()[name], Known(tmp_path)
    wanted = 0.7 * cell.machines

    def peaked(run: Run) -> float:
        if run.kind is not Kind.POLICY or not contenders.is_split(run.policy):
            return 0.9
        prompt, token, _ = contenders.split_of(run.policy, cell)
        return 0.8 - 0.02 * abs(prompt - wanted) if prompt + token >= cell.machines - 1 else 0.1

    played(cell, known, peaked)
    asked = schedule.questions(cell, known)
    assert asked is not None
    best = contenders.split_of(asked.splits_known()[0], cell)[0]
    assert best == round(wanted)


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path) -> None:
    known = Known(tmp_path)
    known.keep(RUN, Result(0.5))
    known.keep(replace(RUN, seed=2), Result(0.6))
    text = known.path.read_text()
    known.path.write_text(text[:-20])
    again = Known(tmp_path)
    assert again.value(RUN) == 0.5
    assert again(replace(RUN, seed=2)) is None
    again.keep(replace(RUN, seed=2), Result(0.7))
    assert Known(tmp_path).value(replace(RUN, seed=2)) == 0.7


def test_an_interrupted_comparison_keeps_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, count = made_up(worth), 0

    def perform(run: Run) -> Result:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return found(run)

    monkeypatch.setattr(crew, "perform", perform)
    chosen = {CELL: cells()[CELL]}
    known = Known(tmp_path)
    stopped = crew.Crew(known, 1, math.inf)
    stopped.work(chosen, lambda cell: comparison(cell, known, QUICK))
    assert (stopped.interrupted, stopped.complete, stopped.done) == (True, False, 3)
    known = Known(tmp_path)
    rest = crew.Crew(known, 1, math.inf)
    rest.work(chosen, lambda cell: comparison(cell, known, QUICK))
    assert (rest.interrupted, rest.complete) == (False, True)
    assert count == 4 + rest.done


def test_nothing_is_started_when_the_time_is_over(tmp_path: Path) -> None:
    known = Known(tmp_path)
    late = crew.Crew(known, 1, 0.0)
    late.work({CELL: cells()[CELL]}, lambda cell: comparison(cell, known, QUICK))
    assert (late.done, late.complete) == (0, False)


# ------------------------------------------------------------------------------------------------------------- verdicts


def test_differences_are_paired_by_draw() -> None:
    own = {1: 0.9, 2: 0.7, 3: 0.8}
    found = paired(own, {seed: value - 0.02 for seed, value in own.items()})
    assert found is not None
    for value in (found.mean, found.low, found.high):
        assert value == pytest.approx(0.02)
    assert paired(own, {4: 0.5}) is None
    one = paired(own, {1: 0.5})
    assert one is not None
    assert (one.draws, one.low) == (1, None)


@pytest.mark.parametrize(
    ("others", "stands"),
    [
        ((0.8, 0.8, 0.8, 0.8, 0.8), Standing.AHEAD),
        ((0.92, 0.88, 0.9, 0.93, 0.87), Standing.LEVEL),
        ((0.95, 0.94, 0.96, 0.95, 0.93), Standing.SHORT),
        ((0.5,), Standing.ONE_DRAW),
        ((0.87,), Standing.OPEN),
        ((), Standing.OPEN),
    ],
)
def test_standings_follow_the_interval(others: tuple[float, ...], stands: Standing) -> None:
    own = dict.fromkeys(range(1, 6), 0.9)
    assert standing(paired(own, dict(enumerate(others, 1))), 5) is stands


def test_a_verdict_names_the_best_rival_and_why(tmp_path: Path) -> None:
    known = Known(tmp_path)
    played(cells()[CELL], known, worth)
    found = judge(cells()[CELL], known, DEFAULT)
    assert found is not None
    assert found.verdict.startswith("short of narwhal by 0.020")
    assert Cause.LATE_GAPS.value in found.verdict
    assert [claim.name for claim in found.claims] == ["best split in hindsight", "clairvoyant", "bound"]
    assert found.clairvoyant == pytest.approx(0.951)
    said = "\n".join(table.cell_lines(found))
    assert "narwhal" in said
    assert "short" in said
    json.dumps(table.document([found]), allow_nan=False)


def test_the_page_holds_the_verdicts_and_keeps_its_words(tmp_path: Path) -> None:
    known, at = Known(tmp_path), tmp_path / "page.md"
    played(cells()[CELL], known, worth)
    found = judge(cells()[CELL], known, DEFAULT)
    assert found is not None
    at.write_text(page.PAGE.read_text())
    page.write([found], "All of it.", at)
    page.write_study("ablation", {CELL: [studies.Effect("no moves", 0.5, 0.0, None)]}, at)
    text = at.read_text()
    assert text.count(found.verdict) == 2
    assert "| code-70b-n4 | no moves | 0.500 |" in text
    assert "How to read it" in text
    assert text.count("<!-- begin") == page.PAGE.read_text().count("<!-- begin") == text.count("<!-- end")


def test_ours_above_all_is_at_least_as_good(tmp_path: Path) -> None:
    known = Known(tmp_path)
    played(cells()[CELL], known, lambda run: 0.99 if run.policy.startswith("ours") else 0.9)
    found = judge(cells()[CELL], known, DEFAULT)
    assert found is not None
    assert found.verdict == "at least as good as all"
    assert all(claim.holds for claim in found.claims)
    assert found.is_good


def test_above_is_more_than_as_good_as_and_what_is_missed_says_why(tmp_path: Path) -> None:
    cell, known = cells()["lost-70b-n4"], Known(tmp_path)
    played(cell, known, lambda run: 0.9)
    found = judge(cell, known, DEFAULT)
    assert found is not None
    claim = found.claims[0]
    assert (claim.name, claim.ratio, claim.above, claim.holds) == ("best split in hindsight", 1.0, True, False)
    assert Cause.LATE_GAPS.value in claim.why
    assert "to be above 1: missed; mostly late gaps" in table.claim_text(claim)


def test_a_run_above_its_bound_is_said_to_be_wrong_in_every_draw(tmp_path: Path) -> None:
    known = Known(tmp_path)
    played(cells()[CELL], known, lambda run: 1.1 if run.policy == "narwhal" and run.seed == 3 else 0.9)
    found = judge(cells()[CELL], known, DEFAULT)
    assert found is not None
    assert [fault.partition(" attained")[0] for fault in found.faults] == ["narwhal"]
    assert "in draw 3" in found.faults[0]


def test_the_shuffled_row_is_held_against_its_own_bound(tmp_path: Path) -> None:
    known = Known(tmp_path)
    played(cells()[CELL], known, lambda run: 1.1 if run.copies is Copies.SHUFFLED else 0.9, schedule.FULL)
    found = judge(cells()[CELL], known, schedule.FULL)
    assert found is not None
    assert found.faults
    assert all("shuffled" in fault for fault in found.faults)


def test_what_a_policy_does_on_other_machines_is_not_held_against_the_bound(tmp_path: Path) -> None:
    cell, known = cells()[CELL], Known(tmp_path)
    played(cell, known, lambda run: 0.9)
    asked = schedule.questions(cell, known)
    assert asked is not None
    run = asked.policy("distserve", 1)
    assert "distserve" in asked.bounded(1)
    known.keep(run, Result(1.0, own_machines=True))
    assert "distserve" not in asked.bounded(1)


def test_a_rival_without_a_result_is_no_rival_that_ours_is_as_good_as(tmp_path: Path) -> None:
    cell, known = cells()[CELL], Known(tmp_path)
    played(cell, known, lambda run: 0.99 if run.policy.startswith("ours") else 0.9)
    asked = schedule.questions(cell, known)
    assert asked is not None
    known.keep(asked.policy("narwhal", 1), Result(None, "ZeroDivisionError: by it", crashed=True))
    found = judge(cell, known, DEFAULT)
    assert found is not None
    assert not found.is_good
    assert "without a result: narwhal" in found.verdict
    assert found.crashes == ["narwhal: ZeroDivisionError: by it"]
    assert table.summary_lines([found])[0].startswith("0 of 1 cells")
    assert {row.policy: row.standing for row in found.rows}["narwhal"] is Standing.FAILED


def test_a_fault_of_the_program_is_told_from_a_name_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> RunOutcome:
        raise ZeroDivisionError("by it")

    monkeypatch.setattr(runs, "simulate", broken)
    found = runs.perform(Run(Kind.POLICY, short(), "vllm", seed=1, able=capacity(short())))
    assert (found.value, found.crashed, found.note) == (None, True, "ZeroDivisionError: by it")


def test_as_shipped_is_beside_ours_and_counts_in_no_verdict(tmp_path: Path) -> None:
    cell, known = cells()[CELL], Known(tmp_path)
    played(cell, known, lambda run: 0.99 if run.policy.startswith("ours-as-shipped") else 0.9)
    found = judge(cell, known, DEFAULT)
    assert found is not None
    assert [row.policy for row in found.rows[:3]] == ["ours", *contenders.SHIPPED]
    assert all(row.standing is Standing.SHORT for row in found.rows[1:3])
    assert found.is_good
    assert "as-shipped" not in found.verdict


def test_nothing_known_is_no_verdict(tmp_path: Path) -> None:
    assert judge(cells()[CELL], Known(tmp_path), DEFAULT) is None
    known = Known(tmp_path)
    known.keep(capacity_of(cells()[CELL]), made_up(worth)(capacity_of(cells()[CELL])))
    found = judge(cells()[CELL], known, DEFAULT)
    assert found is not None
    assert "not run" in found.verdict


# ---------------------------------------------------------------------------------------------------------- other modes


def test_goodput_is_found_by_asking_for_one_rate_after_another(tmp_path: Path) -> None:
    known, cell = Known(tmp_path), cells()[CELL]
    known.keep(capacity_of(cell), made_up(worth)(capacity_of(cell)))
    asked = 0
    while True:
        try:
            (found,) = full.goodputs(cell, known, ["ours"])
            break
        except full.Missing as lacking:
            for run in lacking.runs:
                asked += 1
                assert asked < 100
                known.keep(run, Result(1.0 - run.cell.share / 4))
    # 90 % at a share of .4 of 10 requests a second on 4 machines, 99 % at .04, which is not tried.
    assert found.per_machine[0] == pytest.approx(0.4 * 10 / 4, rel=0.03)
    assert found.per_machine[1] is None


def test_tuning_takes_the_best_on_the_held_out_slice(tmp_path: Path) -> None:
    known, cell = Known(tmp_path), cells()[CELL]
    other = full.held_out(cell)
    assert other.slice != cell.slice
    with pytest.raises(full.Missing) as lacking:
        full.tuned(cell, known)
    assert [run.cell for run in lacking.value.runs] == [other]
    known.keep(lacking.value.runs[0], made_up(worth)(lacking.value.runs[0]))
    with pytest.raises(full.Missing) as lacking:
        full.tuned(cell, known)
    for run in lacking.value.runs:
        known.keep(run, Result(0.9 if "512" in run.policy or "1.2" in run.policy else 0.5))
    best = full.tuned(cell, known)
    assert best["sarathi"] == "sarathi:budget=512"
    assert best["arrow"].startswith("arrow:expand=1.2")
    for name in best.values():
        contenders.policy_of(name, short_world())


def test_the_full_comparison_tunes_first_and_ends_with_goodput(tmp_path: Path) -> None:
    cell, known = cells()["code-70b-n2"], Known(tmp_path)
    effort = schedule.Effort(("sarathi", "narwhal"), 2, searched_machines=0)
    found, done = made_up(lambda run: 1.0 - run.cell.share / 4), 0
    while (left := missing(full.stages(cell, known, effort), known)) is not None:
        for run in dict.fromkeys(left[1]):
            known.keep(run, found(run))
            done += 1
        assert done < 2000
    names = full.all_names(cell, known, effort)
    assert names[0] == "ours"
    assert any(name.startswith("sarathi:budget=") for name in names)
    rates = {one.policy: one.per_machine for one in full.goodputs(cell, known, names)}
    assert rates.keys() == set(names)
    assert rates["ours"][0] == pytest.approx(0.4 * 10 / 2, rel=0.03)


def test_every_published_policy_has_something_to_tune() -> None:
    assert set(tuning()[1]) == set(contenders.PUBLISHED)
    for cell in (cells()["code-70b-n2"], cells()["code-70b-n40"]):
        for name, forms in full.candidates(cell).items():
            assert len(set(forms)) > 1 or name in ("splitwise", "splitwise-sim", "distserve", "mooncake")
    where = short_world()
    for forms in full.candidates(where.cell).values():
        for form in forms:
            assert contenders.policy_of(form, where)[0].parameters


def test_distserve_has_its_own_parallelism_for_each_phase_and_no_gpu_more() -> None:
    where = short_world("conversation-70b-n4")
    own = contenders.own_world("distserve", where)
    gpus = [sum(model.gpus for model in world.setting.machines) for world in (own, where)]
    assert gpus[0] <= gpus[1]
    assert len({model.name for model in contenders.parallelisms(where.cell.machine).values()}) == 2
    assert own.conditions.models == own.setting.machines
    assert contenders.own_world("distserve:parallelism=same", where) is where
    assert contenders.own_world("narwhal", where) is where
    policy, told = contenders.policy_of("distserve", own)
    roles = list(policy.first_roles(told))
    assert len(roles) == len(own.setting.machines)
    assert 0 < roles.count(Role.PROMPT) < len(roles)


def test_parts_without_an_option_are_there_and_come_back() -> None:
    before = {part: [getattr(m, name) for m, name, _ in parts.changes_of(part)] for part in parts.PARTS}
    for part in parts.PARTS:
        with parts.without(part):
            for module, name, value in parts.changes_of(part):
                assert getattr(module, name) is value
        assert [getattr(m, name) for m, name, _ in parts.changes_of(part)] == before[part]
    with pytest.raises(ValueError, match="there is no part"), parts.without("luck"):
        pass


def test_what_is_left_of_the_full_comparison_is_more(tmp_path: Path) -> None:
    cell, known = cells()[CELL], Known(tmp_path)
    default = estimate.left([cell], known, lambda cell, of: comparison(cell, of, DEFAULT))
    whole = estimate.left([cell], known, lambda cell, of: full.stages(cell, of, schedule.FULL))
    assert default.many < whole.few
    assert known.path.read_text() == ""  # nothing was run, and nothing is kept of what was made up


def test_what_is_left_is_priced_by_what_runs_took(tmp_path: Path) -> None:
    cell, known = cells()[CELL], Known(tmp_path)
    before = estimate.left([cell], known, lambda cell, of: comparison(cell, of, DEFAULT))
    assert 0 < before.few < before.many
    assert "goes on when called again" in before.text(1, 60.0)
    assert "again" not in before.text(100, 1e9)
    played(cell, known, worth)
    after = estimate.left([cell], known, lambda cell, of: comparison(cell, of, DEFAULT))
    assert (after.few, after.many) == (0, 0)
    run = replace(RUN, cell=cell)
    known.keep(run, Result(0.5, requests=100, cpu_seconds=20.0))
    able = run.able
    assert able is not None
    requests = able.requests_per_second[0] * cell.share * cell.seconds
    assert estimate.seconds(replace(run, seed=run.seed), Known(tmp_path)) == pytest.approx(0.2 * requests)


def test_every_part_that_can_be_off_is_in_the_ablation() -> None:
    names = [variant.policy for variant in studies.ablation()]
    assert names[0] == "ours"
    assert {"ours:dwell_seconds=0", "ours:without=donor-test", "ours:without=confirmation"} <= set(names)
    assert {"ours:moves=off", "ours:priced=off", "ours:affinity=off", "ours:admission=on"} <= set(names)
    for name in names:
        contenders.policy_of(name, short_world())


def test_effects_are_less_than_ours_as_it_is(tmp_path: Path) -> None:
    known, cell = Known(tmp_path), cells()[CELL]
    variants = studies.sensitivity()
    while (left := missing(studies.stages(cell, known, variants, (1, 2)), known)) is not None:
        for run in left[1]:
            known.keep(run, made_up(lambda run: 0.8 if run.twist.forecast == 2.0 else 0.9)(run))
    found = {effect.variant: effect for effect in studies.effects(cell, known, variants, (1, 2))}
    assert len(found) == len(variants)
    doubled = found["output forecast doubled"].difference
    assert doubled is not None
    assert doubled.mean == pytest.approx(0.1)
    assert found["as it is"].difference is None


# --------------------------------------------------------------------------------------------------------- command line


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    line = [sys.executable, "-m", "bench.policy", *words]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.timeout(600)
def test_the_quick_comparison_runs_and_is_not_run_twice(tmp_path: Path) -> None:
    # Its own limit is for people; a machine that does other things may take longer.
    words = ("--quick", "--minutes", "8", "--folder", str(tmp_path / "runs"), "--json", str(tmp_path / "found.json"))
    first = bench(*words)
    assert first.returncode == 0, first.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["complete"]
    assert set(found["cells"]) == {name for name, cell in cells().items() if cell.quick}
    for cell in found["cells"].values():
        rows = {row["policy"]: row for row in cell["rows"]}
        assert {"ours", *QUICK.policies} <= rows.keys()
        assert all(0 <= row["value"] <= 1 for row in rows.values())
        assert rows["ours"]["draws"] == QUICK.seeds
        assert {*contenders.SHIPPED} <= rows.keys()
        assert rows["ours"]["value"] <= cell["bound"] + 1e-9
        assert cell["faults"] == cell["crashes"] == []
    assert all(cell["clairvoyant"] for cell in found["cells"].values() if cell["cell"]["machines"] == 2)
    again = bench(*words)
    assert again.returncode == 0
    assert "0 runs in" in again.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cell", "nowhere"), "nowhere"),
        (("--policy", "nobody"), "nobody"),
        (("--cell", CELL, "--policy", "static:1/1"), "4 machines"),
        (("--policy", "ours:speed=1"), "speed"),
    ],
)
def test_names_that_are_none_are_refused_before_anything_runs(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.policy", *words, "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_references_are_found_and_no_run_passes_them(tmp_path: Path) -> None:
    cell, known = replace(short("conversation-70b-n2", 20.0), share=0.9), Known(tmp_path)
    asked = schedule.Questions(cell, capacity(cell), known)
    done = [asked.policy(name, 1) for name in ("ours", "static:1/1/0")]
    for run in (*done, asked.policy("ours", 1, twist=Twist(knows=True)), asked.clairvoyant(1, Search.COARSE)):
        known.keep(run, runs.perform(run))
    bound = asked.bound(1)
    known.keep(bound, runs.perform(bound))
    most = known.value(bound)
    assert most is not None
    assert 0 < most <= 1
    found = [known.value(run) for run in (*done, asked.clairvoyant(1, Search.COARSE))]
    assert all(value is not None and 0 < value <= most + 1e-9 for value in found)


def test_the_targets_of_cells_are_above_what_a_machine_takes_alone() -> None:
    for cell in cells().values():
        target = slo(cell)
        assert target.tbt_seconds > 0
        assert target.ttft_seconds > 0
        assert (target.ttft_seconds_per_token > 0) is (cell.ttft_per_token > 0)


def test_every_module_of_the_bench_is_parsed_as_it_is_hashed() -> None:
    for path in (ROOT / "bench" / "policy").glob("*.py"):
        ast.parse(path.read_text())
        assert source.path_of(f"bench.policy.{path.stem}") == path
    assert isinstance(verdict.CONFIDENCE, float)
