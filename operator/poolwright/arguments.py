"""Options of the long-running processes: refused in one line, never a screen of usage; knows no option by name."""

import argparse
import os
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Ends with status 2 and one line on standard error that names the option."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def port(text: str) -> int:
    """0 takes a free one."""
    return _within(text, 0, 65535)


def count(text: str) -> int:
    return _within(text, 1, 2**31 - 1)


def tokens(text: str) -> int:
    return _within(text, 0, 2**31 - 1)


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return number


def readable_file(text: str) -> Path:
    path = Path(text)
    if problem := unreadable(path):
        raise argparse.ArgumentTypeError(problem)
    return path


def unreadable(file: Path) -> str | None:
    """Why the file cannot be read, in words; None where it can."""
    if not file.exists():
        return f"{file} does not exist"
    if file.is_dir():
        return f"{file} is a folder, not a file"
    return None if os.access(file, os.R_OK) else f"{file} may not be read by this user"


def _within(text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number from {least} {'to ' + str(most) if most < 2**31 - 1 else 'up'}"
        )
    return number
