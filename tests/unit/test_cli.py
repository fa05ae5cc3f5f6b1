"""`poolwright`: what a user types, what is printed, with which exit code; and that help stays fast."""

import json
import os
import re
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from poolwright.api.crd import render
from poolwright.cli.main import app
from support.bad_specs import bad_specs, good_spec

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2.yaml"
HEAVY = ["torch", "kopf", "fastapi", "kubernetes", "uvicorn", "aiohttp", "httpx"]


@pytest.fixture
def cli() -> CliRunner:
    return CliRunner()


def plain(text: str) -> str:
    """Without colours and the line breaks of a narrow terminal."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())


def test_version_is_that_of_the_distribution(cli: CliRunner) -> None:
    done = cli.invoke(app, ["version"])
    assert (done.exit_code, done.stdout.strip()) == (0, version("poolwright"))


def test_crd_prints_the_file_byte_for_byte(cli: CliRunner) -> None:
    done = cli.invoke(app, ["crd"])
    assert (done.exit_code, done.stdout) == (0, render())


def test_no_verb_prints_the_verbs_and_an_unknown_one_is_refused(cli: CliRunner) -> None:
    bare = cli.invoke(app, [])
    for verb in ("operator", "router", "demo", "plan", "simulate", "ledger", "validate", "crd", "version"):
        assert verb in bare.output
    unknown = cli.invoke(app, ["fly"])
    assert unknown.exit_code == 2
    assert "No such command 'fly'" in plain(unknown.output)


def test_example_is_valid(cli: CliRunner) -> None:
    done = cli.invoke(app, ["validate", str(EXAMPLE)])
    assert (done.exit_code, done.stdout) == (0, f"{EXAMPLE}: smollm2: valid\n")


def test_every_field_that_is_wrong_is_named(cli: CliRunner, tmp_path: Path) -> None:
    for bad in bad_specs():
        file = tmp_path / f"{bad.name}.yaml"
        file.write_text(yaml.safe_dump(bad.pool))
        done = cli.invoke(app, ["validate", str(file)])
        assert done.exit_code == 1, bad.name
        named = {line.split(": ")[1] for line in done.stderr.splitlines()}
        assert bad.paths <= named, bad.name


def test_standard_input_and_other_kinds_in_the_same_file(cli: CliRunner) -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "other"}}
    done = cli.invoke(app, ["validate", "-"], input=yaml.safe_dump_all([service, good_spec(), None]))
    assert (done.exit_code, done.stdout) == (0, "-: chat: valid\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [", "while parsing"), ("- 1\n- 2\n", ""), ("just text", ""), (b"\xff\xfe\x00", "")],
    ids=["broken YAML", "a list", "a text", "no text"],
)
def test_a_file_that_holds_no_manifest_is_one_error_and_no_traceback(
    cli: CliRunner, tmp_path: Path, text: str | bytes, said: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    done = cli.invoke(app, ["validate", str(file)])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert str(file) in done.stderr
    assert said in done.stderr


def test_one_bad_file_among_good_ones_fails_and_all_are_looked_at(cli: CliRunner, tmp_path: Path) -> None:
    done = cli.invoke(app, ["validate", str(tmp_path / "none.yaml"), str(EXAMPLE)])
    assert done.exit_code == 1
    assert "none.yaml: " in done.stderr
    assert "smollm2: valid" in done.stdout


def test_help_and_version_import_nothing_heavy() -> None:
    """Each verb imports what it needs when it runs; so completion is fast and a router needs no operator."""
    program = f"""
        import json, sys
        from poolwright.cli.main import app
        for arguments in (["--help"], ["version"]):
            try:
                app(arguments)
            except SystemExit as end:
                assert not end.code, end.code
        print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
    """
    assert json.loads(run(program).splitlines()[-1]) == []


def test_validate_and_crd_need_neither_operator_nor_router() -> None:
    program = f"""
        import json, sys
        from poolwright.cli.main import app
        for arguments in (["validate", {str(EXAMPLE)!r}], ["crd"]):
            try:
                app(arguments)
            except SystemExit as end:
                assert not end.code, end.code
        print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
    """
    assert json.loads(run(program).splitlines()[-1]) == []


@pytest.mark.parametrize("verb", ["operator", "router"])
def test_options_of_a_process_are_its_own(cli: CliRunner, verb: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "poolwright.cli.main", verb, "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"usage: poolwright {verb}" in done.stdout
    wrong = subprocess.run(
        [sys.executable, "-m", "poolwright.cli.main", verb, "--nosuch"], capture_output=True, text=True, timeout=60
    )
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


def run(program: str) -> str:
    """A fresh interpreter's output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
