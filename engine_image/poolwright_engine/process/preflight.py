"""What can be refused before PyTorch is imported and a port is opened: seconds earlier, in one line.

Owns no rule of its own that loading has not: it only looks sooner, and lets pass what it cannot know.
"""

import ctypes

from poolwright_engine.process import source
from poolwright_engine.process.config import ConfigError, Device, EngineConfig, dtype_on


def refuse_early(config: EngineConfig) -> None:
    """Raises ConfigError."""
    source.look(config.model)
    has_driver = config.device != "cpu" and cuda_driver_is_there()
    if config.device == "cuda" and not has_driver:
        raise ConfigError("--device: cuda was asked for, and this machine has no driver of an NVIDIA GPU (libcuda)")
    if not has_driver:
        dtype_on(config, Device("cpu"), stored="float32")


def cuda_driver_is_there() -> bool:
    """Without it PyTorch finds no GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
