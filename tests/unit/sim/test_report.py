"""Plans and runs are shown with the numbers they have; what is unknown is said to be."""

import base64
import json
import re
import struct
from dataclasses import asdict, replace

import pytest

from poolwright.sim import plan as planning
from poolwright.sim.measures import measure
from poolwright.sim.ours import Options, ours
from poolwright.sim.outcome import RoleInterval
from poolwright.sim.plan import Plan, Question
from poolwright.sim.policy import Slo
from poolwright.sim.report import Run, move_times, page, plan_document, plan_lines, pool_sizes, run_document, run_lines
from poolwright.sim.simulation import simulate
from poolwright_protocol.roles import Role
from support.linear_step_time import LinearStepTime, machine_model
from support.sim_policies import poisson_trace

MODEL = machine_model(
    step_time=LinearStepTime(fixed_seconds=0.03, prompt_token_seconds=4e-4, decode_seconds=1e-3, kv_token_seconds=1e-7)
)
SLO = Slo(4.0, 0.3)
TRACE = poisson_trace(60, 3, prompt_tokens=600, output_tokens=20)
QUESTION = Question(TRACE, SLO, (MODEL,), gbps=100.0, machines=2)


@pytest.fixture(scope="module")
def planned() -> Plan:
    return list(planning.plan(QUESTION))[-1]


@pytest.fixture(scope="module")
def run() -> Run:
    setting = planning.setting_of(QUESTION, [MODEL] * 2)
    outcome = simulate(ours(Options()), TRACE, setting)
    return Run.of("ours <b>", "ours & nobody's", outcome, measure(outcome, SLO))


def test_a_plan_says_form_cost_power_ledger_idle_memory_and_verdict(planned: Plan) -> None:
    said = "\n".join(plan_lines(planned))
    chosen = planned.chosen()
    assert chosen is not None
    for part in (f"plan: {chosen.form.name}", "verdict: ", "KV ledger", "this network, 100 Gbps", "KV memory idle"):
        assert part in said
    assert "cost: unknown" in said
    assert "power: unknown" in said
    assert f"{chosen.measures.attainment:.1%}" in said


def test_a_long_search_shows_its_best_and_says_how_many_more(planned: Plan) -> None:
    many = replace(planned, evaluated=planned.evaluated * 10)
    said = plan_lines(many)
    assert "and 8 that attain less or cost more; --json has all" in said
    assert len(plan_document(many)["evaluated"]) == 20


def test_prices_are_shown_where_they_are_known() -> None:
    priced = replace(QUESTION, kinds=(MODEL._replace(dollars_per_hour=3.5, watts=400.0),))
    said = "\n".join(plan_lines(list(planning.plan(priced))[-1]))
    assert "$7.00 an hour" in said
    assert "0.8 kW" in said


def test_an_interrupted_plan_says_so_and_one_without_runs_says_that() -> None:
    steps = planning.plan(QUESTION)
    assert plan_lines(next(steps))[0].startswith("Interrupted")
    steps.close()
    assert plan_lines(Plan(QUESTION)) == ["Nothing was run yet"]


def test_documents_are_json_without_infinities(planned: Plan, run: Run) -> None:
    endless = replace(run, measures=replace(run.measures, moves_per_hour=float("inf")))
    for document in (plan_document(planned), plan_document(Plan(QUESTION)), run_document([endless], complete=True)):
        json.dumps(document, allow_nan=False)
    assert plan_document(planned)["plan"]["dollars_per_hour"] is None
    assert plan_document(Plan(QUESTION))["verdict"] is None
    shares = plan_document(planned)["kv_ledger"]["placements"]
    assert shares[0]["name"] == "network"
    assert shares[0]["share"] == pytest.approx(shares[1]["share"] / 4)


def test_runs_are_a_table_with_a_line_each(run: Run) -> None:
    heads, line = run_lines([run])
    assert heads.startswith("policy")
    assert f"{run.measures.attainment:.1%}" in line


def test_pools_are_counted_at_their_times_and_moves_found(run: Run) -> None:
    intervals = [
        RoleInterval("a", Role.PROMPT, 0.0, 10.0),
        RoleInterval("a", Role.TOKEN, 10.0, 20.0),
        RoleInterval("b", Role.TOKEN, 0.0, 20.0),
    ]
    outcome = replace(run, intervals=intervals)
    sizes = pool_sizes(outcome, [5.0, 10.0, 15.0])
    assert (sizes[Role.PROMPT], sizes[Role.TOKEN], sizes[Role.MIXED]) == ([1, 0, 0], [1, 2, 2], [0, 0, 0])
    assert move_times(outcome) == [10.0]


def test_page_holds_its_pictures_needs_no_other_file_and_escapes_names(run: Run) -> None:
    written = page("a < b", [run])
    assert "<b>" not in written
    assert "a &lt; b" in written
    assert "nobody&#x27;s" in written
    assert re.findall(r'(?:src|href)="(?!data:)', written) == []
    (picture,) = re.findall(r"data:image/png;base64,([^\"]+)", written)
    data = base64.b64decode(picture)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 400
    assert height > 300


def test_a_run_that_was_kept_is_shown_as_the_run(run: Run) -> None:
    kept = Run.from_json(json.loads(json.dumps(asdict(run))))
    assert run_lines([kept]) == run_lines([run])
    assert run_document([kept], True) == run_document([run], True)
    assert page("again", [kept]) == page("again", [run])
