"""Where traces and tables lie, and their rows. Knows nothing of what they mean.

An installed package holds them beside this module; in a checkout they are `bench/data/`, whose README names the origin
and the licence of each.
"""

import csv
import io
import lzma
from collections.abc import Iterator
from importlib import resources
from pathlib import Path


def folder() -> Path:
    packed = Path(str(resources.files("poolwright.sim").joinpath("data")))
    return packed if packed.is_dir() else Path(__file__).parents[3] / "bench" / "data"


def text(name: str, at: Path | None = None) -> str:
    """The file `name`, or `name`.xz. Raises FileNotFoundError."""
    path = (at or folder()) / name
    if path.exists():
        return path.read_text(encoding="utf-8")
    return lzma.decompress(path.with_name(f"{name}.xz").read_bytes()).decode()


def rows(name: str, at: Path | None = None) -> Iterator[dict[str, str]]:
    return csv.DictReader(io.StringIO(text(name, at)))
