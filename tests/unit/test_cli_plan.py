"""`poolwright plan`, `simulate` and `ledger`: what is typed, what is printed, with which exit code."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from poolwright.cli import plan as verb
from poolwright.cli.main import app
from poolwright.sim import simulation

LOAD = ["--prompt-tokens", "400,900", "--output-tokens", "20,40", "--rate", "3", "--seconds", "20"]
PLAN = ["plan", "--hardware", "a100-llama-8b-tp1", *LOAD]
SIMULATE = ["simulate", "--hardware", "a100-llama-8b-tp1", "--machines", "2", *LOAD]


@pytest.fixture
def cli() -> CliRunner:
    return CliRunner()


def test_plan_prints_what_the_least_is(cli: CliRunner) -> None:
    done = cli.invoke(app, PLAN)
    assert done.exit_code == 0, done.output
    for part in ("plan: 1 mixed a100-llama-8b-tp1", "verdict: one pool", "$2.20 an hour", "0.4 kW", "KV ledger"):
        assert part in done.stdout


def test_plan_as_json_is_the_same_plan(cli: CliRunner) -> None:
    done = cli.invoke(app, [*PLAN, "--json", "--machines", "2"])
    document = json.loads(done.stdout)
    assert document["complete"]
    assert [e["gpus"] for e in document["evaluated"]] == [2, 2]
    assert document["verdict"]["answer"] == "one_pool"


def test_a_file_keeps_what_was_simulated(cli: CliRunner, tmp_path: Path) -> None:
    file = tmp_path / "kept"
    first = cli.invoke(app, [*PLAN, "--resume", str(file)])
    size = file.stat().st_size
    assert size > 0
    assert cli.invoke(app, [*PLAN, "--resume", str(file)]).stdout == first.stdout
    assert file.stat().st_size == size
    assert cli.invoke(app, [*PLAN, "--resume", str(tmp_path / "no" / "such")]).exit_code == 2
    other = tmp_path / "other"
    other.write_text("mine\n")
    assert cli.invoke(app, [*PLAN, "--resume", str(other)]).exit_code == 2
    assert other.read_text() == "mine\n"


def test_targets_that_nothing_meets_are_exit_code_1(cli: CliRunner) -> None:
    done = cli.invoke(app, [*PLAN, "--most-machines", "2", "--tbt", "0.0001"])
    assert done.exit_code == 1, done.output
    assert "misses the target" in done.stdout


def test_an_unknown_price_is_said(cli: CliRunner) -> None:
    asked = ["plan", "--hardware", "h200-llama-8b-tp1", *LOAD]
    assert "cost: unknown" in cli.invoke(app, asked).stdout
    refused = cli.invoke(app, [*asked, "--goal", "cost"])
    assert refused.exit_code == 2
    assert "price of h200-llama-8b-tp1" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hardware", "abacus", *LOAD], "no machine 'abacus'"),
        (["--hardware", "a100-llama-8b-tp1"], "give --trace"),
        (["--hardware", "a100-llama-8b-tp1", *LOAD, "--trace", "azure-code"], "not both"),
        (["--hardware", "a100-llama-8b-tp1", "--trace", "nowhere"], "azure-conversation"),
        (["--hardware", "a100-llama-8b-tp1", *LOAD, "--rate", "-1"], "above 0"),
        (["--hardware", "a100-llama-8b-tp1", *LOAD, "--prompt-tokens", "9,3"], "no length"),
        (["--hardware", "a100-llama-8b-tp1", *LOAD, "--prompt-tokens", "long"], "no length"),
        (["--hardware", "a100-llama-8b-tp1", *LOAD, "--goal", "fame"], "fame"),
        (["--hardware", "a100-llama-8b-tp1", "--hardware", "a100-llama-70b-tp8", *LOAD], "different models"),
    ],
)
def test_what_makes_no_question_is_refused_with_its_reason(cli: CliRunner, arguments: list[str], said: str) -> None:
    done = cli.invoke(app, ["plan", *arguments])
    assert done.exit_code == 2
    assert said in done.stderr


def test_ctrl_c_prints_what_is_known(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    real, runs = simulation.simulate, []

    def interrupted(*arguments: object, **options: object) -> object:
        runs.append(1)
        if len(runs) > 2:  # one pool runs twice
            raise KeyboardInterrupt
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("poolwright.sim.plan.simulate", interrupted)
    done = cli.invoke(app, PLAN)
    assert done.exit_code == verb.INTERRUPTED
    assert "Interrupted" in done.stdout
    assert "1 mixed a100-llama-8b-tp1" in done.stdout


def test_simulate_prints_a_line_for_each_policy_and_writes_its_page(cli: CliRunner, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    done = cli.invoke(app, [*SIMULATE, "--policy", "ours", "--policy", "1P1T", "--html", str(file)])
    assert done.exit_code == 0, done.output
    assert re.search(r"^ours +\d", done.stdout, re.MULTILINE)
    assert re.search(r"^static 1P1T +\d", done.stdout, re.MULTILINE)
    assert file.read_text().count("data:image/png;base64,") == 2
    pictures = [tmp_path / f"page-{name}.png" for name in ("ours", "static-1p1t")]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_simulate_goes_on_where_it_was_interrupted(
    cli: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [*SIMULATE, "--policy", "1P1T", "--policy", "ours", "--html", str(tmp_path / "a.html")]
    whole = cli.invoke(app, asked)
    pictures = (tmp_path / "a.html").read_text()
    real, runs = simulation.simulate, []

    def interrupted(*arguments: object, **options: object) -> object:
        runs.append(1)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(simulation, "simulate", interrupted)
    kept = [*asked, "--resume", str(tmp_path / "kept")]
    assert cli.invoke(app, kept).exit_code == verb.INTERRUPTED
    rest = cli.invoke(app, kept)
    assert (rest.stdout, rest.exit_code) == (whole.stdout, 0)
    assert (tmp_path / "a.html").read_text() == pictures
    assert len(runs) == 3
    assert cli.invoke(app, kept).stdout == whole.stdout
    assert len(runs) == 3
    cli.invoke(app, [*kept, "--tbt", "0.2"])
    assert len(runs) == 5
    assert cli.invoke(app, [*SIMULATE, "--resume", str(tmp_path / "no" / "such")]).exit_code == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_of_a_terminal_and_is_gone_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    progress = verb.Progress()
    for share in (0.0, 0.5, 0.501, 1.0):
        progress("ours", share)
    progress("1P1T", 1.0)
    progress.clear()
    frames = shown.getvalue().split("\r\x1b[K")
    assert frames == ["", "  0 %  ours", " 50 %  ours", "100 %  ours", "100 %  1P1T", ""]
    assert "\n" not in shown.getvalue()


def test_progress_is_silent_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    progress = verb.Progress()
    progress("ours", 0.5)
    progress.clear()
    assert shown.getvalue() == ""


def test_simulate_tells_how_far_it_is(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float]] = []
    monkeypatch.setattr(verb.Progress, "__call__", lambda _, name, share: told.append((name, share)))
    assert cli.invoke(app, [*SIMULATE, "--policy", "1P1T", "--policy", "2M"]).exit_code == 0
    for name in ("1P1T", "2M"):
        shares = [share for told_name, share in told if told_name == name]
        assert shares == sorted(shares)
        assert shares[-1] > 0.9


def test_simulate_as_json_has_pools_and_measures(cli: CliRunner) -> None:
    document = json.loads(cli.invoke(app, [*SIMULATE, "--policy", "2M", "--json"]).stdout)
    (run,) = document["runs"]
    assert run["measures"]["requests"] > 20
    assert {interval["role"] for interval in run["pools"]} == {"mixed"}


def test_simulate_interrupted_prints_what_had_run(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    real, runs = simulation.simulate, []

    def interrupted(*arguments: object, **options: object) -> object:
        runs.append(1)
        if len(runs) > 1:
            raise KeyboardInterrupt
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(simulation, "simulate", interrupted)
    done = cli.invoke(app, [*SIMULATE, "--policy", "1P1T", "--policy", "ours"])
    assert done.exit_code == verb.INTERRUPTED
    assert "static 1P1T" in done.stdout
    assert not re.search(r"^ours", done.stdout, re.MULTILINE)


def test_an_unknown_policy_is_told_the_names(cli: CliRunner) -> None:
    done = cli.invoke(app, [*SIMULATE, "--policy", "luck"])
    assert done.exit_code == 2
    assert "distserve" in done.stderr
    assert "1P1T" in done.stderr


def test_ledger_is_distserve_s_example_or_that_of_a_model(cli: CliRunner) -> None:
    assert "1.125 GiB = 1.208 GB" in cli.invoke(app, ["ledger"]).stdout
    assert "GQA" in cli.invoke(app, ["ledger", "llama-70b", "--prompt-tokens", "2048", "--rate", "5"]).stdout
    assert cli.invoke(app, ["ledger", "abacus"]).exit_code == 2
    assert cli.invoke(app, ["ledger", "opt-66b", "--rate", "-1"]).exit_code == 2


@pytest.mark.parametrize("arguments", [PLAN, SIMULATE, ["ledger"]])
def test_what_to_install_is_said_where_libraries_are_absent(
    cli: CliRunner, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(verb, "find_spec", lambda name: None)
    done = cli.invoke(app, arguments)
    assert done.exit_code == 2
    assert "pip install 'poolwright[sim]'" in done.stderr
