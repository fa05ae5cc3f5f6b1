"""What a test needs from the machine it runs on. In CI its absence is a failure, elsewhere a skip with the reason."""

import os
import shutil
from typing import NoReturn

import pytest


def binary(name: str, package: str) -> str:
    """The path of a program that a test needs."""
    path = shutil.which(name)
    if path is None:
        unavailable(f"{name} is not on the PATH (Debian package {package})")
    return path


def unavailable(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
