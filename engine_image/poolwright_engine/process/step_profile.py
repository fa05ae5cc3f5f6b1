"""What a step costs on this machine, read from a file that `offline.profile` wrote."""

import json
from pathlib import Path

from poolwright_engine.process.config import ConfigError
from poolwright_protocol.step_time import StepProfile, profile_from_document


def read_step_profile(path: Path) -> StepProfile:
    """The fitted part of a file that `poolwright-engine profile` wrote. Raises ConfigError."""
    try:
        return profile_from_document(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
