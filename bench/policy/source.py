"""What a result was computed with, as a hash: of every module that a starting point imports, and of the data.

Comments and blank lines do not count. Knows no policy and runs nothing.
"""

import ast
import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "poolwright": ROOT / "operator" / "poolwright",
    "poolwright_engine": ROOT / "engine_image" / "poolwright_engine",
    "poolwright_protocol": ROOT / "protocol" / "poolwright_protocol",
    "bench": ROOT / "bench",
}
DATA = ROOT / "bench" / "data"


def digest(modules: Sequence[str], alone: Sequence[str] = ()) -> str:
    """Of these modules, whatever of this project they import, and the data; of `alone` only their own code."""
    total = hashlib.sha256(_data().encode())
    seen: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        waiting.extend(_read(module)[1])
    for module in sorted(seen.union(alone)):
        total.update(f"{module} {_read(module)[0]}\n".encode())
    return total.hexdigest()[:16]


def path_of(module: str) -> Path | None:
    package, _, rest = module.partition(".")
    if package not in PACKAGES:
        return None
    place = PACKAGES[package].joinpath(*rest.split(".")) if rest else PACKAGES[package]
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def _read(module: str) -> tuple[str, tuple[str, ...]]:
    """Hash of its code, and the project's modules that it names."""
    path = path_of(module)
    if path is None:
        return "", ()
    tree = ast.parse(path.read_bytes())
    code = hashlib.sha256(ast.dump(tree).encode()).hexdigest()
    return code, tuple(sorted({name for name in _imported(tree) if path_of(name) is not None}))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def _data() -> str:
    total = hashlib.sha256()
    for path in sorted(DATA.iterdir()):
        if path.suffix != ".md":
            total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()
