"""What the sections of `make gpu` share: a report written at once, times by CUDA events, and what a device could do."""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

# By a part of the device's name: bytes and dense bf16 operations a second, from NVIDIA's data sheets.
ROOFLINES = {
    "H200": (4.8e12, 989e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100": (3.35e12, 989e12),
    "A100": (2.0e12, 312e12),
    "B200": (8.0e12, 2250e12),
    "L40S": (0.864e12, 362e12),
}


class Skipped(Exception):
    """The section has nothing to do here; why."""


class Bench:
    def __init__(self, section: str, target: Path, device: str, tiny: bool) -> None:
        self.section = section
        self.tiny = tiny
        self.device = torch.device(device)
        self.failures: list[str] = []
        self._target = target
        self._entries: list[dict[str, Any]] = []
        if device == "cuda":
            if not torch.cuda.is_available():
                raise SystemExit("PyTorch finds no GPU: nothing was run (--device cpu --tiny tries the script itself)")
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False
        torch.manual_seed(0)
        self.write("running", "")

    @property
    def is_cuda(self) -> bool:
        return bool(self.device.type == "cuda")

    def say(self, **entry: Any) -> None:
        """One more entry, on disk at once."""
        self._entries.append(entry)
        print(entry, flush=True)
        self.write("running", "")

    def check(self, what: str, right: bool, **entry: Any) -> None:
        self.say(check=what, right=right, **entry)
        if not right:
            self.failures.append(f"{what}: {entry}")

    def end(self, state: str, line: str) -> None:
        self.write(state, line)

    def write(self, state: str, line: str) -> None:
        name = torch.cuda.get_device_name() if self.is_cuda else "cpu"
        found = {"section": self.section, "state": state, "line": line[:600], "device": name, "entries": self._entries}
        self._target.write_text(json.dumps(found, indent=1))

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, calls: Mapping[str, Callable[[], object]], rounds: int = 30, warm: int = 3) -> dict[str, float]:
        """Median seconds of each on the device, taken in turn. The device is kept busy before each call, so that what
        the host takes to launch it is not measured."""
        rounds, warm = (2, 1) if self.tiny else (rounds, warm)
        for call in calls.values():
            for _ in range(warm):
                call()
        self.synchronize()
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                taken[name].append(self._one(call))
        return {name: statistics.median(each) for name, each in taken.items()}

    def _one(self, call: Callable[[], object]) -> float:
        if not self.is_cuda:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # cycles: about a millisecond
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def roofline(self) -> tuple[float, float]:
        """Bytes and operations a second that the device is sold with; NaN for one that is not in the table."""
        name = torch.cuda.get_device_name() if self.is_cuda else ""
        return next((rates for part, rates in ROOFLINES.items() if part in name), (float("nan"), float("nan")))


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest error over the largest number; NaN where one was found."""
    return float((found.double().cpu() - truth.double().cpu()).abs().max() / truth.double().abs().max().cpu())


def largest(errors: Iterable[float]) -> float:
    """NaN where one of them is."""
    return float(torch.tensor(list(errors), dtype=torch.float64).max())
