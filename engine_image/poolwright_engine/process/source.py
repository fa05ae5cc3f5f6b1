"""Where a model comes from: a path, a mounted volume, or the Hugging Face Hub. `locate` gives the path to load.

Owns names of models, what of a repository is fetched, and one line for each way this can fail. Knows no weights:
whether a configuration can be served is asked of the caller before gigabytes are fetched for nothing.
"""

import errno
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from poolwright_engine.process.config import ConfigError

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called now and then with bytes fetched and bytes to fetch, from a thread of its own; once more at the end."""

_HUB_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:/(?P<file>[\w./+-]+\.gguf))?(?::(?P<quantization>[\w.-]+))?"
)
_CONFIGURATIONS = ("config.json", "adapter_config.json")  # the loader refuses an adapter, and says what it is
_SMALL_FILES = (".json", ".jinja")
_HUB_TIMEOUT_SECONDS = 10.0
_POLL_SECONDS = 0.5
_LOG_SECONDS = 10.0
# Mistral's repositories hold all weights twice: once under Hugging Face names, once in a file of this name.
_OTHER_NAMES = "consolidated"


@dataclass(frozen=True, slots=True)
class HubName:
    """`ORG/NAME`, `ORG/NAME:QUANTIZATION` or `ORG/NAME/FILE.gguf`."""

    repository: str
    file: str | None = None
    quantization: str | None = None


def parse(model: str) -> Path | HubName:
    """A path where there is such a path, or where it can be nothing else. Raises ConfigError."""
    path = Path(model).expanduser()
    if model and (model.startswith(("/", "./", "../", "~")) or path.exists()):
        if not path.exists():
            raise ConfigError(f"--model: model path {path} does not exist")
        return path
    found = _HUB_NAME.fullmatch(model)
    if found is None or ".." in model:
        raise ConfigError(
            f"--model: {model!r} is neither a path of this machine nor a repository of the Hub "
            "(ORG/NAME, ORG/NAME:QUANTIZATION or ORG/NAME/FILE.gguf)"
        )
    return HubName(**found.groupdict())


def look(model: str) -> None:
    """At what can be seen at once, without reading a model or asking the Hub. Raises ConfigError."""
    parsed = parse(model)
    if isinstance(parsed, Path):
        _on_disk(parsed)


def name_of(model: str) -> str:
    """What clients call it unless they are told otherwise."""
    path = Path(model).expanduser()
    return (path.name or str(path)) if path.is_absolute() or path.exists() or model[:1] in (".", "~") else model


def locate(
    model: str,
    revision: str | None = None,
    cache: Path | None = None,
    can_serve: Callable[[Path], None] = lambda config: None,
    progress: Progress | None = None,
    endpoint: str | None = None,
) -> Path:
    """Blocks, for a download perhaps for long. `can_serve` gets the path of config.json before any weights are fetched,
    and raises what it likes. `endpoint` and `cache`: where they are None the library's environment says
    (HF_ENDPOINT, HF_HOME; and HF_TOKEN, HF_HUB_OFFLINE). Raises ConfigError."""
    parsed = parse(model)
    if isinstance(parsed, Path):
        return _on_disk(parsed)
    return _Hub(parsed, revision, cache, endpoint).fetch(can_serve, progress or logged_progress())


def logged_progress(every_seconds: float = _LOG_SECONDS) -> Progress:
    last = time.monotonic()

    def report(done_bytes: int, total_bytes: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done_bytes >= total_bytes or now - last >= every_seconds:
            last = now
            log.info("Fetched the model done=%s total=%s", size(done_bytes), size(total_bytes))

    return report


def size(count: int) -> str:
    """Bytes for a person."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit in ("B", "kB") else f"{value:.1f} {unit}"


# --- a path ------------------------------------------------------------------------------------------------------


def _on_disk(path: Path) -> Path:
    """A file, a folder, or a folder as the Hub's cache lays one out: what a volume filled by its own tools holds."""
    if not path.is_dir():
        if path.suffix != ".gguf":
            raise ConfigError(f"--model: {path} is neither a .gguf file nor a folder")
        return path
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise ConfigError(f"--model: {path} cannot be read: {error.strerror or error}") from error
    if not [name for name in names if name != "lost+found"]:
        raise ConfigError(f"--model: {path} is an empty folder; is its volume mounted?")
    if "snapshots" in names and "config.json" not in names:
        return _snapshot(path)
    if not any(name in _CONFIGURATIONS or name.endswith(".gguf") for name in names):
        raise ConfigError(f"--model: {path} holds no model: neither config.json nor a .gguf file")
    return path


def _snapshot(path: Path) -> Path:
    main = path / "refs" / "main"
    commits = sorted(os.listdir(path / "snapshots"))
    commit = main.read_text().strip() if main.is_file() else commits[0] if len(commits) == 1 else ""
    if commit not in commits:
        raise ConfigError(f"--model: {path} holds {len(commits)} snapshots and does not say which is meant")
    return path / "snapshots" / commit


# --- the Hub -----------------------------------------------------------------------------------------------------


def choose(name: HubName, files: Sequence[str]) -> list[str]:
    """Of a repository's files, those to fetch. Raises ConfigError."""

    def refused(why: str) -> ConfigError:
        return ConfigError(f"--model: {name.repository} on the Hub {why}")

    if name.file is not None:
        if name.file not in files:
            raise refused(f"holds no file {name.file}")
        return [name.file]
    ggufs = [file for file in files if file.endswith(".gguf")]
    if name.quantization is not None:
        wanted = name.quantization.lower()
        matching = [file for file in ggufs if PurePosixPath(file).stem.lower().endswith(wanted)]
        if len(matching) != 1:
            raise refused(f"holds {len(matching)} GGUF files of quantization {name.quantization} ({_listed(ggufs)})")
        return matching
    top = [file for file in files if "/" not in file]
    if "config.json" in top:
        weights = [file for file in top if file.endswith(".safetensors") and not file.startswith(_OTHER_NAMES)]
        if weights:
            return [file for file in top if file.endswith(_SMALL_FILES)] + weights
        if not ggufs:
            pickled = any(file.endswith((".bin", ".pt", ".pth")) for file in top)
            raise refused("holds no safetensors" + (", only pickled weights, which are not read" if pickled else ""))
    if len(ggufs) != 1:
        raise refused(
            f"holds {len(ggufs)} GGUF files; choose one as {name.repository}/FILE ({_listed(ggufs)})"
            if ggufs
            else "has no config.json and no GGUF file"
        )
    return ggufs


def _listed(files: Sequence[str], most: int = 6) -> str:
    return ", ".join(files[:most]) + (", …" if len(files) > most else "") if files else "none"


class _Hub:
    """One repository, and what the cache has of it."""

    def __init__(self, name: HubName, revision: str | None, cache: Path | None, endpoint: str | None) -> None:
        from huggingface_hub import constants  # late: a path needs none of it

        self._name = name
        self._revision = revision
        self._endpoint = endpoint or constants.ENDPOINT
        self._cache = Path(cache or constants.HF_HUB_CACHE).expanduser()

    def fetch(self, can_serve: Callable[[Path], None], progress: Progress) -> Path:
        from huggingface_hub import HfApi

        name = self._name
        try:
            found = HfApi(endpoint=self._endpoint).model_info(
                name.repository, revision=self._revision, files_metadata=True, timeout=_HUB_TIMEOUT_SECONDS
            )
        except Exception as error:  # of several libraries below; each is told in one line
            return self._cached(error)
        sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
        chosen = choose(name, list(sizes))
        if "config.json" in chosen:
            can_serve(self._download(["config.json"]) / "config.json")
        missing = sum(sizes[file] for file in chosen if not self._has(file, found.sha))
        self._check_space(missing)
        with self._metered(missing, progress):
            return self._model(self._download(chosen), chosen)

    def _download(self, files: list[str], offline: bool = False) -> Path:
        """Raises ConfigError; while offline, what the library raises."""
        from huggingface_hub import snapshot_download

        try:
            return Path(
                snapshot_download(
                    self._name.repository,
                    revision=self._revision,
                    cache_dir=self._cache,
                    allow_patterns=files,
                    local_files_only=offline,
                    tqdm_class=_silent_bar(),
                    endpoint=self._endpoint,
                )
            )
        except Exception as error:
            if offline:
                raise
            raise self._refusal(error) from error

    def _cached(self, reason: Exception) -> Path:
        """What an earlier download left, where the Hub cannot be asked or does not answer; complete, or not at all."""
        try:
            folder = self._download([], offline=True)
        except Exception:
            raise self._refusal(reason) from reason
        files = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
        try:
            chosen = choose(self._name, files)
        except ConfigError:
            raise ConfigError(f"{self._refusal(reason)}; the cache has only a part of it") from reason
        missing = sorted(set(_shards(folder)) - set(files))
        if missing:
            raise ConfigError(f"{self._refusal(reason)}; the cache lacks {_listed(missing)}") from reason
        log.warning("Used the copy in the cache path=%s reason=%s", folder, self._refusal(reason))
        return self._model(folder, chosen)

    def _model(self, folder: Path, chosen: Sequence[str]) -> Path:
        return folder / chosen[0] if chosen[0].endswith(".gguf") else folder

    def _has(self, file: str, commit: str | None) -> bool:
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(self._name.repository, file, self._cache, commit), str)

    def _check_space(self, needed_bytes: int) -> None:
        folder = next((place for place in (self._cache, *self._cache.parents) if place.exists()), Path("/"))
        free = shutil.disk_usage(folder).free
        if free < needed_bytes:
            raise ConfigError(
                f"--model: {self._name.repository} needs {size(needed_bytes)} in {self._cache}, which has {size(free)}"
                " free; --download-dir names another place"
            )

    @contextmanager
    def _metered(self, total_bytes: int, progress: Progress) -> Iterator[None]:
        """What the cache's folder grows by is what has come. A thread, because the library reports files, not bytes,
        and not the same way in each version."""
        blobs = self._cache / f"models--{self._name.repository.replace('/', '--')}" / "blobs"
        before, ended = _folder_bytes(blobs), threading.Event()

        def report() -> None:
            while not ended.wait(_POLL_SECONDS):
                progress(min(total_bytes, max(0, _folder_bytes(blobs) - before)), total_bytes)

        thread = threading.Thread(target=report, name="download-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        if total_bytes:
            progress(total_bytes, total_bytes)

    def _refusal(self, error: Exception) -> ConfigError:
        from huggingface_hub import errors

        repository = self._name.repository
        if isinstance(error, errors.GatedRepoError):
            why = f"{repository} is gated: accept its terms on the Hub, and give a token that may read it in HF_TOKEN"
        elif isinstance(error, errors.RepositoryNotFoundError):
            why = f"the Hub has no repository {repository}, or it is private and HF_TOKEN gives no access to it"
        elif isinstance(error, errors.RevisionNotFoundError):
            why = f"{repository} on the Hub has no revision {self._revision}"
        elif isinstance(error, errors.OfflineModeIsEnabled):
            why = f"{repository} is not in the cache {self._cache}, and HF_HUB_OFFLINE forbids to fetch it"
        elif isinstance(error, errors.HfHubHTTPError) and error.response is not None:
            why = f"the Hub ({self._endpoint}) answered {error.response.status_code} for {repository}"
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
            why = f"no space left in {self._cache} for {repository}; --download-dir names another place"
        elif isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            why = f"{self._cache} cannot be written, where {repository} would go; --download-dir names another place"
        else:
            detail = " ".join(f"{type(error).__name__}: {error}".split())
            why = f"{repository} could not be fetched from the Hub ({self._endpoint}): {detail[:300]}"
        return ConfigError(f"--model: {why}")


def _shards(folder: Path) -> list[str]:
    """The weight files that the index names; none where there is no index."""
    index = folder / "model.safetensors.index.json"
    try:
        return list(dict.fromkeys(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else []
    except (ValueError, KeyError, AttributeError, TypeError):
        return []  # the loader says what is wrong with it


def _folder_bytes(folder: Path) -> int:
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    total += entry.stat().st_size
                except OSError:  # renamed as its last byte came
                    continue
    except OSError:
        return 0
    return total


def _silent_bar() -> type:
    """The library's own bars would be drawn into a server's log."""
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    return Silent
