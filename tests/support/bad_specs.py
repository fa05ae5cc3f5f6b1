"""The corpus of specs that must be refused, each with the field it must be refused for."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CONTRACT = Path(__file__).parent.parent / "contract"


@dataclass(frozen=True)
class BadSpec:
    """`pool` is the good one with one thing broken; `paths` are the fields to be named, all and no others."""

    name: str
    why: str
    paths: frozenset[str]
    pool: dict[str, Any]


def good_spec() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CONTRACT / "good_spec.yaml").read_text())
    return loaded


def bad_specs() -> list[BadSpec]:
    corpus = []
    for file in sorted((CONTRACT / "bad_specs").glob("*.yaml")):
        raw = yaml.safe_load(file.read_text())
        corpus.append(BadSpec(file.stem, raw["why"], frozenset(raw["paths"]), _merge(good_spec(), raw["change"])))
    return corpus


def _merge(target: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7386)."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value)
    return merged
