"""Decisions recorded from other projects' own code, see tests/fixtures/decisions/README.md."""

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "fixtures" / "decisions"


@pytest.fixture
def recorded() -> Callable[[str], Any]:
    def read(name: str) -> Any:
        with lzma.open(FOLDER / f"{name}.json.xz", "rt") as file:
            return json.load(file)["decisions"]

    return read
