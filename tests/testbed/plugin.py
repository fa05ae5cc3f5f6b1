"""What pytest does for tests on the bed: prepares it outside of any test's time limit; in CI lets none be skipped.

Owns these hooks and the order of tests; and that those with a node, which measure, begin when no other session of the
suite runs. Loaded by tests/conftest.py.
"""

import os
import subprocess
import time
from collections.abc import Generator

import pytest

from testbed import prepare, progress

BED_MARKERS = ("cluster", "node", "prometheus")
AFTER = "POOLWRIGHT_TEST_ALONE_AFTER"  # the other session's process id, from scripts/suite.py


def _needs_bed(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(marker) for marker in BED_MARKERS)


def on_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on the bed run last, those with a node at the very end: what they need is compiled while the others run."""
    items.sort(key=lambda item: 2 if item.get_closest_marker("node") else 1 if _needs_bed(item) else 0)
    wanted = prepare.wanted_by({name for item in items for name in getattr(item, "fixturenames", ())})
    if wanted and not config.option.collectonly:
        config.stash[_background] = prepare.in_background(wanted)


_background = pytest.StashKey[subprocess.Popen[bytes] | None]()


def pytest_unconfigure(config: pytest.Config) -> None:
    process = config.stash.get(_background, None)
    if process is not None and process.poll() is None:
        process.terminate()
        process.wait()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Waits for what the test's fixtures need, and for quiet where it needs that, before the test's clock starts."""
    if item.get_closest_marker("node") and AFTER in os.environ:
        _wait_for_end(int(os.environ.pop(AFTER)))
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


def _wait_for_end(process_id: int) -> None:
    """Of the other session, which its parent reaps as soon as it has ended."""
    while True:
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            return
        time.sleep(0.5)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and on_ci() and _needs_bed(item):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"CI=true allows no skipped test of the real thing: {reason}"
    return report
