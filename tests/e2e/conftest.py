"""What tests on a node share, and the summaries that they want printed at the end of the run."""

import pytest

from support.summary import PROPERTY
from testbed.fixtures import api_server as api_server
from testbed.fixtures import helm as helm
from testbed.fixtures import node_cluster as node_cluster
from testbed.fixtures import project_images as project_images


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    texts = [
        text for report in reports if report.when == "call" for name, text in report.user_properties if name == PROPERTY
    ]
    for text in texts:
        title, _, body = text.partition("\n")
        terminalreporter.section(title)
        terminalreporter.line(body)
