"""Several sessions of pytest have every test between them, one closing line and one exit code."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import suite

FIRST = """
tests/unit/test_x.py::test_of_12_failed in 3s
=========== short test summary info ===========
FAILED tests/unit/test_x.py::test_y - 7 passed in 1.00s
========== 2 failed, 10 passed, 1 skipped, 5 deselected, 1 error in 62.21s (0:01:02) ==========
"""
QUIET = "....\n3 passed, 2 errors in 0.02s\n"
NOTHING = "============ no tests ran in 0.02s ============\n"


def test_every_file_is_in_one_session() -> None:
    sessions = suite.sessions()
    files = [str(path.relative_to(suite.ROOT)) for path in suite.files_of_tests()]
    assert len(files) > 100
    for file in files:
        folders = {str(folder) for folder in Path(file).parents}
        having = [s for s in sessions if f"--ignore={file}" not in s and {file, *folders} & set(s)]
        assert len(having) == 1, file


def test_the_closing_line_counts_every_session() -> None:
    assert suite.closing([FIRST], 62.2).strip("=") == " 3 failed, 10 passed, 1 skipped in 62.20s (0:01:02) "
    assert suite.closing([FIRST, QUIET, NOTHING], 1).strip("=") == " 5 failed, 13 passed, 1 skipped in 1.00s (0:00:01) "
    assert suite.closing([QUIET.replace(", 2 errors", "")], 1).strip("=") == " 3 passed in 1.00s (0:00:01) "
    assert suite.closing([NOTHING, NOTHING], 0).strip("=") == " no tests ran in 0.00s (0:00:00) "


def test_a_session_without_an_end_is_no_success() -> None:
    finished = QUIET.replace(", 2 errors", "")
    assert (
        suite.closing([finished, "tests/unit/test_x.py ...."], 1).strip("=")
        == " 1 failed, 3 passed in 1.00s (0:00:01) "
    )


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([0, 5], 0), ([5, 5], 5), ([1, 0], 1), ([5, 2], 2), ([0, -9], -9), ([1, 3], 1)]
)
def test_one_session_that_fails_fails_the_suite(codes: list[int], code: int) -> None:
    assert suite.exit_code(codes) == code
