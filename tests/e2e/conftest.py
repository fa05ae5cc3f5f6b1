"""What tests on a node share, and the summaries that they want printed at the end of the run."""

import pytest

from support.summary import SUMMARIES
from testbed.fixtures import api_server as api_server
from testbed.fixtures import helm as helm
from testbed.fixtures import node_cluster as node_cluster
from testbed.fixtures import project_images as project_images


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for text in config.stash.get(SUMMARIES, []):
        title, _, body = text.partition("\n")
        terminalreporter.section(title)
        terminalreporter.line(body)
