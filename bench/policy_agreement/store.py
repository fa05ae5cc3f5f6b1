"""The file of a bench: what has been measured so far, by section, so that a run that was cut off goes on."""

import json
import os
from pathlib import Path
from typing import Any

Section = dict[str, Any]


class Store:
    def __init__(self, file: Path, keep: bool) -> None:
        """`keep`: what the file has of the same setup stays."""
        self.file = file
        self._found: dict[str, Section] = {}
        if keep and file.exists():
            self._found = json.loads(file.read_text(encoding="utf-8"))

    def section(self, name: str, setup: Any) -> Section:
        """As kept; a new one where the setup was another."""
        section = self._found.get(name)
        plain = json.loads(json.dumps(setup))
        if section is None or section["setup"] != plain:
            section = self._found[name] = {"setup": plain, "repeats": []}
        return section

    def sections(self) -> dict[str, Section]:
        return self._found

    def save(self) -> None:
        """Whole or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.file.with_name(f"{self.file.name}.new")
        fresh.write_text(json.dumps(self._found) + "\n", encoding="utf-8")
        os.replace(fresh, self.file)
