"""What pytest does for tests on the bed: prepares it outside of any test's time limit; in CI lets none be skipped.

Owns these hooks, the order of tests, and that they wait while another session measures. Loaded by tests/conftest.py.
"""

import os
import subprocess
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext

import pytest

from testbed import prepare, progress, quiet
from testbed.quiet import Quiet

BED_MARKERS = ("cluster", "node", "prometheus")


def _needs_bed(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(marker) for marker in BED_MARKERS)


def on_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_quiet] = quiet.of_this_suite()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on the bed run last, those with a node at the very end: what they need is compiled while the others run."""
    items.sort(key=lambda item: 2 if item.get_closest_marker("node") else 1 if _needs_bed(item) else 0)
    wanted = prepare.wanted_by({name for item in items for name in getattr(item, "fixturenames", ())})
    if wanted and not config.option.collectonly:
        config.stash[_background] = prepare.in_background(wanted)


_background = pytest.StashKey[subprocess.Popen[bytes] | None]()
_quiet = pytest.StashKey[Quiet | None]()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (found := config.stash.get(_quiet, None)) is not None:
        found.close()
    process = config.stash.get(_background, None)
    if process is not None and process.poll() is None:
        process.terminate()
        process.wait()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Waits for the end of what another session measures, and for what the test's fixtures need, before the test's
    clock starts."""
    if (found := item.config.stash[_quiet]) is not None:
        found.begin(item.path)
    wanted = prepare.wanted_by(set(getattr(item, "fixturenames", ())))
    if wanted:
        capture = item.config.pluginmanager.getplugin("capturemanager")
        terminal = item.config.get_terminal_writer()

        def show(line: str) -> None:
            with capture.global_and_fixture_disabled():
                terminal.line()
                terminal.line(line)

        progress.send_to(show)
        prepare.ensure(wanted)  # what cannot be had is said again by the fixture, as the test's own failure or skip
    return (yield)


@pytest.fixture(scope="session")
def alone(pytestconfig: pytest.Config) -> Callable[[], AbstractContextManager[None]]:
    """A context for what is measured: no test of another session of the suite runs meanwhile."""
    found = pytestconfig.stash[_quiet]
    return nullcontext if found is None else found.alone


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and on_ci() and _needs_bed(item):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"CI=true allows no skipped test of the real thing: {reason}"
    return report
