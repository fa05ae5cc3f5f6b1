"""`poolwright validate`: every InferencePool in files, folders and standard input, checked as the API server would.

To have checked nothing is a failure: a manifest that holds no pool, or a folder without one, is never called good.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from poolwright.api.models import InferencePool, InvalidPool

KIND = "InferencePool"
_STANDARD_INPUT = "-"
_SUFFIXES = frozenset({".yaml", ".yml", ".json"})  # those that kubectl takes from a folder


class _Problem(Exception):
    """What is wrong with a file or folder, without its name."""


def run(given: Sequence[Path]) -> int:
    """The exit code: 0 where every pool is valid and each file and folder given holds one, else 1."""
    valid = bad = 0
    for path in given:
        pools, others, unreadable = 0, [], 0
        for file in _files(path):
            try:
                documents = _documents(file)
            except _Problem as problem:
                typer.echo(f"{file}: {problem}", err=True)
                unreadable += 1
                continue
            for document in documents:
                if isinstance(document, dict) and document.get("kind") != KIND:
                    others.append(str(document.get("kind", "a document without kind")))
                    continue
                pools += 1
                good = _check(file, document)
                valid, bad = valid + good, bad + (not good)
        bad += unreadable
        if not pools and not unreadable:
            found = f", only {', '.join(dict.fromkeys(others))}" if others else ""
            typer.echo(f"{path}: no {KIND} was found{found}", err=True)
            bad += 1
    if not bad:
        typer.echo(f"{valid} {KIND}{'' if valid == 1 else 's'} checked: valid")
    return 1 if bad else 0


def _files(path: Path) -> list[Path]:
    """The manifests of a folder, not of folders within it; else the path itself."""
    if str(path) == _STANDARD_INPUT or not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file())


def _documents(file: Path) -> list[Any]:
    """Items of lists, as `kubectl get -o yaml` prints them, stand for themselves. Raises _Problem."""
    try:
        text = sys.stdin.read() if str(file) == _STANDARD_INPUT else file.read_text()
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except FileNotFoundError as error:
        raise _Problem("does not exist") from error
    except OSError as error:
        raise _Problem(f"cannot be read: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise _Problem("is not text in UTF-8") from error
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise _Problem(where + ", ".join(part for part in (error.context, error.problem) if part)) from error
    except yaml.YAMLError as error:
        raise _Problem(" ".join(str(error).split())) from error
    return [item for document in documents for item in _items(document)]


def _items(document: object) -> list[Any]:
    if isinstance(document, dict) and document.get("kind") == "List" and isinstance(document.get("items"), list):
        return list(document["items"])
    return [document]


def _check(file: Path, document: object) -> bool:
    try:
        pool = InferencePool.parse(document)
    except InvalidPool as error:
        for field, message in error.errors:
            typer.echo(f"{file}: {field}: {message}", err=True)
        return False
    typer.echo(f"{file}: {pool.metadata.name}: valid")
    return True
