"""`poolwright`: what a user types, what is printed, with which exit code; and that help stays fast."""

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import typer.main
import yaml
from typer.core import TyperGroup
from typer.testing import CliRunner

from poolwright.api.crd import render
from poolwright.cli.main import app
from poolwright.controller.options import _parser as operator_parser
from poolwright.controller.options import parse as parse_operator
from poolwright.router.main import _parser as router_parser
from poolwright.router.main import main as router_main
from poolwright_protocol import names
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
    assert (done.exit_code, done.stdout) == (0, f"{EXAMPLE}: smollm2: valid\n1 InferencePool checked: valid\n")


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
    assert (done.exit_code, done.stdout) == (0, "-: chat: valid\n1 InferencePool checked: valid\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no InferencePool was found"),
        ("# nothing\n---\n", "no InferencePool was found"),
        ("kind: Service\n---\nkind: ConfigMap\n", "no InferencePool was found, only Service, ConfigMap"),
        ("metadata: {name: chat}\n", "no InferencePool was found, only a document without kind"),
    ],
    ids=["empty", "a comment", "other kinds", "no kind"],
)
def test_to_have_checked_nothing_is_a_failure(cli: CliRunner, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(text)
    done = cli.invoke(app, ["validate", str(EXAMPLE), str(file)])
    assert done.exit_code == 1
    assert done.stderr == f"{file}: {said}\n"
    assert "checked" not in done.stdout


def test_a_folder_is_checked_whole_and_one_without_a_pool_fails(cli: CliRunner, tmp_path: Path) -> None:
    assert cli.invoke(app, ["validate", str(tmp_path)]).stderr == f"{tmp_path}: no InferencePool was found\n"
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(good_spec()))
    (tmp_path / "b.json").write_text(json.dumps({"kind": "List", "items": [good_spec(), {"kind": "Service"}]}))
    (tmp_path / "service.yml").write_text("kind: Service\n")
    (tmp_path / "notes.txt").write_text("a: [")
    done = cli.invoke(app, ["validate", str(tmp_path)])
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "2 InferencePools checked: valid"
    (tmp_path / "broken.yaml").write_text("a: [")
    broken = cli.invoke(app, ["validate", str(tmp_path)])
    assert broken.exit_code == 1
    assert broken.stderr.startswith(f"{tmp_path / 'broken.yaml'}: line ")


def test_what_cannot_be_read_is_said_in_words_with_its_name_once(cli: CliRunner, tmp_path: Path) -> None:
    absent, binary = tmp_path / "none.yaml", tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    done = cli.invoke(app, ["validate", str(absent), str(binary)])
    assert done.exit_code == 1
    assert done.stderr == f"{absent}: does not exist\n{binary}: is not text in UTF-8\n"


def test_version_is_an_option_too(cli: CliRunner) -> None:
    done = cli.invoke(app, ["--version"])
    assert (done.exit_code, done.stdout.strip()) == (0, version("poolwright"))


def test_every_option_says_what_it_is_for_and_what_it_is_by_default() -> None:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    silent = [
        f"{verb} {option.name}"
        for verb, command in root.commands.items()
        for option in command.params
        if not getattr(option, "help", None)
    ]
    assert silent == []
    for parser in (operator_parser(), router_parser()):
        for action in parser._actions:
            assert action.help, action.option_strings
            if "--help" not in action.option_strings and "required" not in action.help:
                assert "default" in action.help, action.option_strings
        assert parser.format_help()


ROUTER = {names.ENV_POOL: "chat", names.ENV_POOL_NAMESPACE: "llm", names.ENV_POOL_KEY: "ab" * 32}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "99999"], "argument --port: '99999' is no whole number from 0 to 65535"),
        (["--port", "web"], "argument --port: 'web' is no whole number from 0 to 65535"),
        (["--max-in-flight-requests", "0"], "argument --max-in-flight-requests: '0' is no whole number from 1 up"),
        (["--drain-seconds", "-1"], "argument --drain-seconds: '-1' is no number of seconds"),
        (["--machines-file", "/nope"], "argument --machines-file: /nope does not exist"),
        (["--machines-file", "/"], "argument --machines-file: / is a folder, not a file"),
        (["--host", "192.0.2.1", "--port", "0"], "cannot listen on 192.0.2.1:0: "),
    ],
)
def test_a_router_refuses_a_wrong_option_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(lambda: router_main(arguments, ROUTER)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"poolwright router: {said}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["not json", '[{"name": "half a machine"}]', "7"])
def test_a_router_given_a_file_that_holds_no_machines_does_not_start(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "machines.json"
    file.write_text(text)
    assert status_of(lambda: router_main(["--port=0", f"--machines-file={file}"], ROUTER)) == 2
    error = capsys.readouterr().err
    assert f"{file} does not hold the machines of a pool" in error
    assert error.count("\n") == 1


def test_an_operator_names_all_that_is_missing_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(lambda: parse_operator(["--kubeconfig", "/nope", "--lease-duration-seconds", "2"], {})) == 2
    error = capsys.readouterr().err
    for named in (
        "--namespace",
        "--engine-image is missing",
        "--router-image is missing",
        names.ENV_ROOT_SECRET,
        "--kubeconfig: /nope does not exist",
        "--lease-duration-seconds must be at least 3",
    ):
        assert named in error
    assert error.count("\n") == 1


def test_an_operator_refuses_a_kubeconfig_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    broken.write_text("a: [")
    needed = ["--all-namespaces", "--engine-image=e", "--router-image=r"]
    environment = {names.ENV_ROOT_SECRET: "x" * 32}
    for given, said in (
        (["--kubeconfig", str(broken)], f"--kubeconfig: {broken} is no kubeconfig"),
        (["--kubeconfig", str(tmp_path)], f"--kubeconfig: {tmp_path} is a folder, not a file"),
    ):
        assert status_of(lambda given=given: parse_operator([*needed, *given], environment)) == 2
        assert said in capsys.readouterr().err
    absent = {**environment, "KUBECONFIG": f"/nope{os.pathsep}/neither"}
    assert status_of(lambda: parse_operator(needed, absent)) == 2
    assert "KUBECONFIG: /nope does not exist" in capsys.readouterr().err
    good = tmp_path / "good"
    good.write_text("apiVersion: v1\nkind: Config\n")
    assert parse_operator(needed, {**environment, "KUBECONFIG": f"/nope{os.pathsep}{good}"}).kubeconfig is None
    assert parse_operator([*needed, "--kubeconfig", str(good)], environment).kubeconfig == str(good)


def status_of(run: Callable[[], object]) -> object:
    try:
        return run()
    except SystemExit as end:
        return end.code


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
        for arguments in (["--help"], ["version"], ["--version"]):
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
