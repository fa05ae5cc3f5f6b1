"""What a step costs on a machine, as a file: its format, and reading it. `offline.profile` measures and writes it."""

import json
from pathlib import Path

from poolwright_engine.process.config import ConfigError
from poolwright_engine.scheduling.scheduler_config import StepCost, StepProfile

FORMAT = 1


def read_step_profile(path: Path) -> StepProfile:
    """The fitted part of a file that `poolwright-engine profile` wrote. Raises ConfigError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise ConfigError(f"{path}: format {raw['format']} is not {FORMAT}")
        return StepProfile(decode=StepCost(**raw["decode"]), mixed=StepCost(**raw["mixed"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no profile of a machine: {type(error).__name__}: {error}") from error
