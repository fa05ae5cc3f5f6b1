"""The planner finds the least that does, counts what it costs, and keeps what it knows when it is interrupted."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from poolwright.sim import plan as planning
from poolwright.sim.accounts import Answer
from poolwright.sim.measures import measure
from poolwright.sim.ours import Options
from poolwright.sim.plan import (
    Form,
    Goal,
    Plan,
    Question,
    _tuned,
    at_rate,
    loads,
    memory_key,
    named_trace,
    policy_of,
    read_csv,
    setting_of,
)
from poolwright.sim.plan_memory import PlanMemory
from poolwright.sim.policy import Slo
from poolwright.sim.simulation import simulate
from poolwright_protocol.roles import Role
from support.linear_step_time import LinearStepTime, machine_model
from support.sim_policies import poisson_trace

# Slow, so that few requests are a load.
MODEL = machine_model(
    step_time=LinearStepTime(fixed_seconds=0.03, prompt_token_seconds=4e-4, decode_seconds=1e-3, kv_token_seconds=1e-7)
)
PRICED = MODEL._replace(dollars_per_hour=3.0, watts=500.0)
SLO = Slo(4.0, 0.3)
TRACE = poisson_trace(120, 4, prompt_tokens=800, output_tokens=40)


def question(**changes: object) -> Question:
    given = {"trace": TRACE, "slo": SLO, "kinds": (PRICED,), "gbps": 200.0, "most_machines": 6}
    return Question(**(given | changes))  # type: ignore[arg-type]


def planned(asked: Question) -> Plan:
    return list(planning.plan(asked))[-1]


@pytest.fixture(scope="module")
def searched() -> Plan:
    return planned(question())


def test_the_least_that_meets_the_target_is_found_and_one_less_does_not(searched: Plan) -> None:
    assert searched.complete
    one = searched.best(split=False)
    assert one is not None
    assert one.meets(0.9)
    fewer = [e for e in searched.evaluated if not e.form.split and e.form.machines < one.form.machines]
    assert not any(e.meets(0.9) for e in fewer)


def test_one_pool_counts_with_the_better_of_two_budgets() -> None:
    asked = question(machines=4)
    found = planned(asked).best(split=False)
    assert found is not None
    form = Form(PRICED, PRICED, 0, 0, 4)
    both = []
    for options in (Options(moves=False), Options(moves=False, slack_budget=False, step_tokens=_tuned(asked, PRICED))):
        setting = setting_of(asked, form.models)
        both.append(measure(simulate(policy_of(form, options), TRACE, setting), SLO).attainment)
    assert found.measures.attainment == max(both)


def test_both_forms_were_run_and_the_verdict_has_their_numbers(searched: Plan) -> None:
    found = searched.verdict()
    assert found is not None
    assert len(found.accounts) == 5
    assert all("%" in account.why or "machine" in account.why or "ms" in account.why for account in found.accounts[:4])
    chosen = searched.chosen()
    assert chosen is not None
    assert chosen.form.split is (found.answer is Answer.SPLIT)
    assert searched.with_moves is not None


def test_no_split_far_dearer_than_one_pool_that_does_is_run_but_the_cheapest() -> None:
    forms = [Form(PRICED, PRICED, 1, token) for token in (1, 2, 3, 4, 5)]
    known = planned(question(machines=2))
    searching = Plan(question(), known.evaluated)
    one = searching.best(split=False)
    assert one is not None
    assert one.meets(0.9)
    assert [form.machines for form in planning._worth_running(forms, searching)] == [2, 3]
    assert planning._worth_running(forms[3:], searching) == [forms[3]]
    assert planning._worth_running(forms, Plan(question())) == forms


def test_costs_add_up_and_an_unknown_one_stays_unknown() -> None:
    form = Form(PRICED, PRICED, 2, 1)
    assert (form.dollars_per_hour, form.watts, form.gpus) == (9.0, 1500.0, 3)
    assert Form(PRICED, MODEL, 2, 1).dollars_per_hour is None
    assert form.roles == [Role.PROMPT, Role.PROMPT, Role.TOKEN]


@pytest.mark.parametrize("goal", [Goal.COST, Goal.POWER])
def test_a_goal_that_no_table_knows_is_refused(goal: Goal) -> None:
    with pytest.raises(ValueError, match="not in its table"):
        question(kinds=(MODEL,), goal=goal)


def test_a_fixed_number_runs_every_split_near_the_loads() -> None:
    found = planned(question(machines=3, around=None))
    assert sorted((e.form.prompt, e.form.token, e.form.mixed) for e in found.evaluated) == [
        (0, 0, 3),
        (1, 2, 0),
        (2, 1, 0),
    ]


def test_kinds_may_differ_by_phase_and_the_cheapest_is_tried_first() -> None:
    cheap = PRICED._replace(name="cheap", dollars_per_hour=1.0)
    forms = planning._forms(question(kinds=(PRICED, cheap), goal=Goal.COST, machines=2), True)
    assert [form.dollars_per_hour for form in forms] == [2.0, 4.0, 4.0, 6.0]
    assert {(form.prompt_kind.name, form.token_kind.name) for form in forms[1:3]} == {
        ("linear", "cheap"),
        ("cheap", "linear"),
    }


def test_thin_links_forbid_a_split() -> None:
    found = planned(question(machines=2, gbps=0.5))
    answer = found.verdict()
    assert answer is not None
    assert answer.answer is Answer.DO_NOT_SPLIT
    chosen = found.chosen()
    assert chosen is not None
    assert not chosen.form.split


def test_offline_work_is_one_pool() -> None:
    found = planned(question(machines=2, offline=True))
    answer = found.verdict()
    assert answer is not None
    assert answer.answer is Answer.THROUGHPUT_FIRST


def test_memory_of_prompt_machines_stands_mostly_idle_and_is_counted() -> None:
    found = planned(question(machines=2))
    split = found.best(split=True)
    assert split is not None
    assert split.idle.total_bytes == MODEL.kv_capacity_tokens * MODEL.kv_bytes_per_token
    assert 0.5 < split.idle.share < 1.0
    one = found.best(split=False)
    assert one is not None
    assert one.idle.total_bytes == 0.0


def test_an_interrupted_search_keeps_what_it_knows() -> None:
    steps = planning.plan(question(machines=3))
    known = next(steps)
    steps.close()
    assert not known.complete
    assert len(known.evaluated) == 1
    assert known.chosen() is known.evaluated[0]


def test_a_search_goes_on_from_what_its_file_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = tmp_path / "kept", question(machines=3)
    steps = planning.plan(asked, memory=PlanMemory(file))
    first = next(steps).evaluated[0]
    steps.close()
    file.write_text(file.read_text() + '{"key": "cut o')  # as an interruption leaves it
    whole = list(planning.plan(asked, memory=PlanMemory(file)))[-1]
    assert whole.evaluated[0] == first

    runs: list[str] = []
    monkeypatch.setattr(planning, "_evaluate", lambda _, form, __: runs.append(form.name))
    again = list(planning.plan(asked, memory=PlanMemory(file)))[-1]
    assert runs == []
    assert again.evaluated == whole.evaluated


def test_another_question_or_another_table_is_another_key() -> None:
    asked, form = question(machines=1), Form(PRICED, PRICED, 0, 0, 1)
    slower = PRICED._replace(step_time=LinearStepTime(fixed_seconds=0.05))
    keys = [
        memory_key(question(machines=1), form),
        memory_key(asked, Form(slower, slower, 0, 0, 1)),
        memory_key(asked, Form(PRICED, PRICED, 1, 1)),
        memory_key(replace(asked, gbps=100.0), form),
        memory_key(replace(asked, slo=Slo(1.0, 0.3)), form),
        memory_key(replace(asked, trace=poisson_trace(120, 5)), form),
    ]
    assert memory_key(asked, form) == keys[0]
    assert len(set(keys)) == len(keys)


def test_loads_grow_with_the_rate_and_are_infinite_where_no_answer_keeps_tbt() -> None:
    low, high = (loads(at_rate(TRACE, rate, 1e9, 0), SLO, MODEL, MODEL) for rate in (1.0, 4.0))
    assert low[0] < high[0]
    assert low[1] < high[1]
    assert loads(TRACE, replace(SLO, tbt_seconds=0.001), MODEL, MODEL)[1] == math.inf


@pytest.mark.parametrize(
    "changes",
    [
        {"machines": 0},
        {"kinds": ()},
        {"gbps": 0.0},
        {"target": 1.5},
        {"kinds": (MODEL, MODEL._replace(kv_bytes_per_token=1))},
    ],
)
def test_questions_without_an_answer_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"machine|above 0"):
        question(**changes)


def test_a_csv_is_read_from_its_first_arrival(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("arrival_seconds,prompt_tokens,output_tokens\n12.5,100,10\n10,200,20\n")
    trace = read_csv(file)
    assert [(r.arrival_seconds, r.prompt_tokens, r.output_tokens) for r in trace] == [(0.0, 200, 20), (2.5, 100, 10)]
    assert trace.horizon_seconds == 3.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arrival_seconds,prompt_tokens\n1,2\n", "no column output_tokens"),
        ("arrival_seconds,prompt_tokens,output_tokens\n", "no requests"),
        ("arrival_seconds,prompt_tokens,output_tokens\n1,x,3\n", "line 2"),
        ("arrival_seconds,prompt_tokens,output_tokens\n1,0,3\n", "line 2"),
    ],
)
def test_a_bad_csv_is_told_where(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_csv(file)


def test_an_unknown_trace_is_told_the_names() -> None:
    with pytest.raises(ValueError, match="azure-code"):
        named_trace("nowhere")
