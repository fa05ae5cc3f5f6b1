"""Documents that are generated are up to date, and what they tell a user to configure is accepted by its program."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from poolwright.api.conditions import ConditionType, reasons
from poolwright.controller import names as child_names
from poolwright.core.decision import Reason
from poolwright_engine.cli import main as engine_cli
from poolwright_protocol import names
from support import required

ROOT = Path(__file__).parents[2]
API_SERVER = "engine_image/poolwright_engine/api/server.py"


def scrape_config() -> str:
    (snippet,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return str(snippet)


def test_references_are_what_the_crd_and_the_parser_give(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts" / "reference.py"), str(tmp_path)], check=True)
    for generated in ("docs/reference/resource.md", "docs/reference/engine-cli.md"):
        assert (ROOT / generated).read_text() == (tmp_path / generated).read_text(), "run `make generate`"


def test_commands_of_the_engines_how_to_are_accepted() -> None:
    text = (ROOT / "docs" / "how-to" / "engine.md").read_text()
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    found = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith(f"{engine_cli.PROGRAM} ")]
    assert len(found) > 5
    for words in found:
        engine_cli._parsed(words)


def test_the_readmes_engine_command_is_accepted_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall(rf"{engine_cli.PROGRAM} (serve .+?) &?$", text, re.MULTILINE)
    engine_cli._parsed(shlex.split(command))
    linked = set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text))
    assert {"docs/how-to/engine.md", "docs/reference/engine-cli.md", "docs/reference/engine-api.md"} <= linked
    assert {f"docs/explanation/{page.name}" for page in (ROOT / "docs" / "explanation").glob("*.md")} <= linked
    assert [link for link in linked if not (ROOT / link).exists()] == []


def test_what_stays_open_beside_an_api_key_is_what_security_says() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    paths = set(re.findall(r'@app\.(?:get|post)\("(/[a-z]+)"', (ROOT / API_SERVER).read_text()))
    assert {"/metrics", "/tokenize", "/health"} <= paths
    assert [path for path in paths if f"`{path}`" not in text] == []


def test_options_that_the_engines_how_to_names_exist() -> None:
    known = {flag for command in engine_cli.commands(engine_cli.make_parser()).values() for flag in command.flags()}
    named = set(re.findall(r"`(--[a-z-]+)", (ROOT / "docs" / "how-to" / "engine.md").read_text()))
    assert named
    assert named <= known


@pytest.mark.prometheus
def test_prometheus_accepts_the_scrape_config(tmp_path: Path) -> None:
    promtool = required.binary("promtool", "prometheus")
    file = tmp_path / "prometheus.yml"
    config = yaml.safe_load(scrape_config())
    del config["scrape_configs"][0]["kubernetes_sd_configs"]  # Debian builds it without this discovery
    file.write_text(yaml.safe_dump(config))
    done = subprocess.run([promtool, "check", "config", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_scrape_config_finds_pods_by_their_label_and_port() -> None:
    (job,) = yaml.safe_load(scrape_config())["scrape_configs"]
    (keep,) = job["relabel_configs"]
    label = re.sub(r"[^a-zA-Z0-9]", "_", names.LABEL_COMPONENT)
    assert keep["source_labels"] == [
        f"__meta_kubernetes_pod_label_{label}",
        "__meta_kubernetes_pod_container_port_name",
    ]
    for found in (f"{names.COMPONENT_ROUTER};http", f"{names.COMPONENT_ENGINE};api"):
        assert re.fullmatch(keep["regex"], found)
    assert not re.fullmatch(keep["regex"], f"{names.COMPONENT_ENGINE};admin")


def test_readme_points_at_the_service_that_the_example_makes() -> None:
    assert f"service/{child_names.router_service('smollm2')} " in (ROOT / "README.md").read_text()


def test_words_of_the_troubleshooting_table_are_words_of_the_resource() -> None:
    text = (ROOT / "docs" / "how-to" / "troubleshoot.md").read_text()
    known = {kind.value for kind in ConditionType} | {word for kind in ConditionType for word in reasons(kind)}
    known |= {reason.value for reason in Reason} | {"RolledBack"}
    spelled = set(re.findall(r"`([A-Z][A-Za-z]+)(?:=[A-Za-z]+)?`", text))
    assert spelled - known == set()
    assert spelled
