"""The repository is laid out as its documents say, and its packages do not get into each other's way."""

import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import poolwright
from poolwright_engine import scheduling

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("protocol", "operator", "engine_image", "kernels")
MAPPED = (*SOURCE_ROOTS, "tests/support", "tests/testbed", "scripts", "bench")
MAP = ROOT / "docs" / "map.md"


def tracked() -> list[Path]:
    """Every text file of the repository, those not yet committed included."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip(f"this is no git checkout: {listed.stderr.strip()}")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def in_fresh_interpreter(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ------------------------------------------------------------------------------------------------------------- packages


@pytest.mark.parametrize("folder", SOURCE_ROOTS)
def test_source_roots_are_no_packages(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_standard_librarys_operator_is_not_shadowed_at_the_root(safe_path: str) -> None:
    said = in_fresh_interpreter("import operator; print(operator.itemgetter(0)('ab'))", PYTHONSAFEPATH=safe_path)
    assert said == "a\n"


def test_whole_control_plane_imports_without_pytorch() -> None:
    """Nor numpy, but for simulator and planner, which no service imports."""
    modules = [m.name for m in pkgutil.walk_packages(poolwright.__path__, "poolwright.") if "__main__" not in m.name]
    assert len(modules) > 40
    simulator = [name for name in modules if name.startswith("poolwright.sim")]
    services = [name for name in modules if name not in simulator]
    heavy = ["torch", "triton", "transformers", "poolwright_kernels"]
    assert imported_by(services, [*heavy, "numpy", "poolwright.sim"]) == []
    assert imported_by(simulator, heavy) == []


def imported_by(modules: list[str], wrong: list[str]) -> list[str]:
    """Which of those come along in a fresh interpreter, and which rooms of the engine that are not its scheduling."""
    program = f"""
import importlib, json, sys
for name in {modules!r}:
    importlib.import_module(name)
rooms = {{name.split(".")[1] for name in sys.modules if name.startswith("poolwright_engine.")}}
print(json.dumps([*(name for name in {wrong!r} if name in sys.modules), *(rooms - {{"scheduling"}})]))
"""
    return json.loads(in_fresh_interpreter(program))


def test_engines_scheduler_imports_without_pytorch() -> None:
    modules = [m.name for m in pkgutil.walk_packages(scheduling.__path__, "poolwright_engine.scheduling.")]
    assert len(modules) > 10
    imports = "".join(f"import {name}\n" for name in modules)
    assert in_fresh_interpreter(f"{imports}import sys; print('torch' in sys.modules, 'numpy' in sys.modules)") == (
        "False False\n"
    )


# ----------------------------------------------------------------------------------------------------------------- map


def modules() -> Iterator[str]:
    for root in MAPPED:
        for file in sorted((ROOT / root).rglob("*.py")):
            if file.name != "__init__.py" and "__pycache__" not in file.parts:
                yield str(file.relative_to(ROOT))


def mapped() -> dict[str, str]:
    """path → what the map says of it."""
    folder, found = "", {}
    for line in MAP.read_text().splitlines():
        if heading := re.match(r"### `(.+?)/`", line):
            folder = heading[1]
        elif line.startswith("## "):
            folder = ""
        elif folder and (item := re.match(r"- `(.+?)`: (.*)", line)):
            found[f"{folder}/{item[1]}"] = item[2]
    return found


def test_map_says_what_every_module_owns() -> None:
    assert sorted(set(modules()) - mapped().keys()) == [], "add a line for each to docs/map.md"
    assert [path for path, text in mapped().items() if len(text) < 10] == []


def test_every_path_on_the_map_exists() -> None:
    assert [path for path in mapped() if not (ROOT / path).exists()] == []
    files = {f"/{path.relative_to(ROOT)}" for path in tracked()}
    gone = [
        path
        for path in re.findall(r"`([\w.-]+/[\w./-]*)`", MAP.read_text())
        if not any(file.endswith(f"/{path}") or f"/{path.rstrip('/')}/" in file for file in files)
    ]
    assert gone == []


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for document in tracked():
        if document.suffix == ".md":
            prose = re.sub(r"`[^`]*`", "", document.read_text())
            for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
                if not (document.parent / target).exists():
                    broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert broken == []


def test_readme_opens_with_what_it_is_and_the_two_commands() -> None:
    title, sentence, demo, test, *_ = [line for line in (ROOT / "README.md").read_text().splitlines() if line.strip()]
    assert title == "# Poolwright"
    assert sentence.endswith(".")
    assert (demo.split()[:2], test.split()[:2]) == (["make", "demo"], ["make", "test"])


def test_every_make_verb_that_a_document_names_exists() -> None:
    verbs = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set()
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        named |= set(re.findall(r"(?:^ {4}|`)make ([a-z][a-z-]*)", document.read_text(), re.MULTILINE))
    assert named - verbs == set()


def test_make_help_lists_every_verb() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = next(line for line in makefile.splitlines() if line.startswith(".PHONY:")).split()[1:]
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert sorted(line.split()[0] for line in listed.stdout.splitlines()) == sorted(phony)


# ------------------------------------------------------------------------------------------------- nobody's own machine

# Spelled in pieces, so that this file does not name them.
OWN_PATHS = re.compile(rf"(?<![\w.$}}/)-])/({'ro' + 'ot'}|{'wo' + 'rk'})(?![\w-])")
INDEX_HOSTS = re.compile(r"https?://[^\s/\"']*(pypi|pythonhosted|goproxy|proxy\.golang|artifactory|nexus|devpi)", re.I)


def test_no_file_names_a_path_of_somebodys_machine_or_a_package_index() -> None:
    found = []
    for file in tracked():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if OWN_PATHS.search(line) or INDEX_HOSTS.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


def test_lock_files_pin_every_package_by_hash_and_hold_no_address() -> None:
    for file in sorted((ROOT / "locks").glob("*.txt")):
        text = file.read_text()
        assert "://" not in text, file.name
        for block in re.split(r"^(?=[a-zA-Z0-9])", text, flags=re.MULTILINE)[1:]:
            assert re.match(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==\S+", block), block.splitlines()[0]
            assert "--hash=sha256:" in block, block.splitlines()[0]


def test_versions_of_package_and_chart_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = (ROOT / "helm" / "poolwright" / "Chart.yaml").read_text()
    assert re.findall(r'^(?:appVersion|version): "?([^"\n]+)"?$', chart, re.MULTILINE) == [project, project]
