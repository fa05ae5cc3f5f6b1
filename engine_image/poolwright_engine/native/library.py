"""The shared library of the C sources beside this file: compiled once for a kind of CPU, kept, loaded.

Owns where it lies, who may have written it, and the reason when there is none. The threads of its loops are those of
PyTorch: the library brings no OpenMP of its own and takes the one that is loaded, so `torch.set_num_threads` holds.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_COMPILERS = ("gcc", "cc")  # another compiler's OpenMP is not PyTorch's
_POLL_SECONDS = 0.1
_LIMIT_SECONDS = 300  # some seconds, unless much else runs
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden")
_LINK_FLAGS = ("-shared", "-nostdlib", "-Wl,-z,now")  # no OpenMP, no C library: the process has loaded both

LEVELS = {
    "avx512": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
    "avx2": ("-march=x86-64-v3",),
    "plain": (),
}
"""Kinds of CPU, best first, and what the compiler is told of each."""


class NoLibrary(Exception):
    """There is none; one line says why."""


class CpuOperations(StrEnum):
    """`--cpu-operations`: what the CPU engine computes with."""

    AUTO = "auto"  # C where a library is there or can be made, else PyTorch alone
    NATIVE = "native"
    TORCH = "torch"


def is_native(wanted: CpuOperations) -> bool:
    """Whether the library is to be used. Raises NoLibrary where it must be and there is none."""
    if wanted is CpuOperations.TORCH:
        return False
    try:
        library()
    except NoLibrary as e:
        if wanted is CpuOperations.NATIVE:
            raise
        _warn_once(str(e))
        return False
    return True


@functools.cache
def _warn_once(reason: str) -> None:
    log.warning("Found no library of C operations, steps take longer reason=%s", reason)


def level() -> str:
    """The best kind of CPU that this one is."""
    flags = _cpu_flags()
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_vnni", "avx512_bf16"} <= flags:
        return "avx512"
    if {"avx2", "fma", "bmi1", "bmi2", "abm", "movbe", "f16c"} <= flags:
        return "avx2"
    return "plain"


def library() -> ctypes.CDLL:
    """Compiled now where nobody has done so yet: some seconds, once for a version of the sources and a kind of CPU.
    Raises NoLibrary."""
    found = _library()
    if isinstance(found, str):
        raise NoLibrary(found)
    return found


@functools.cache
def _library() -> ctypes.CDLL | str:
    """Or why not: an attempt is not repeated."""
    try:
        return _loaded(_made())
    except NoLibrary as e:
        return str(e)


def _made() -> Path:
    name = file_name(level())
    try:
        beside = _HERE / "compiled"
        if _is_usable(beside / name) and _is_ours(beside):
            return beside / name
        folder = cache_dir()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(folder):
            raise NoLibrary(f"others may write where it is kept, {folder}")
        if _is_usable(folder / name):
            return folder / name
        with (folder / ".lock").open("a") as lock:
            _wait_for(lock)  # engines that start together compile once
            if _is_usable(folder / name):
                return folder / name
            return compile_into(folder, level())
    except (OSError, RuntimeError) as e:  # RuntimeError: no HOME, and no entry for this user
        raise NoLibrary(f"there is nowhere to keep it: {e}") from e


def _is_usable(path: Path) -> bool:
    return path.exists() and _is_ours(path)


def _wait_for(lock: IO[str]) -> None:
    deadline = time.monotonic() + _LIMIT_SECONDS
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise NoLibrary(f"another process has been making it for {_LIMIT_SECONDS} s") from None
            time.sleep(_POLL_SECONDS)


def cache_dir() -> Path:
    """`${XDG_CACHE_HOME:-~/.cache}/poolwright/native`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "poolwright" / "native"


def file_name(kind: str) -> str:
    """Of a library of these sources; another version of them has another."""
    digest = hashlib.sha256(repr((_FLAGS, _LINK_FLAGS, LEVELS[kind])).encode())
    for source in _sources("*.[ch]"):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return f"{platform.machine()}-{kind}-{digest.hexdigest()[:16]}.so"


def compile_into(folder: Path, kind: str) -> Path:
    """Makes the library for that kind of CPU. Raises NoLibrary."""
    compiler = shlex.split(os.environ.get("CC", "")) or list(filter(None, map(shutil.which, _COMPILERS)))[:1]
    if not compiler:
        raise NoLibrary(f"no C compiler ({', '.join(_COMPILERS)})")
    target = folder / file_name(kind)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".compiling-") as scratch:
        sources = _sources("*.c")
        objects = [f"{source.stem}.o" for source in sources]
        _run((*compiler, *_FLAGS, *LEVELS[kind], "-c", *map(str, sources)), scratch)
        _run((*compiler, *_LINK_FLAGS, "-o", target.name, *objects), scratch)
        made = Path(scratch) / target.name
        made.chmod(0o755)  # whatever the umask: what a group may write is not loaded
        made.replace(target)  # whole or not at all
    log.info("Compiled the C operations kind=%s path=%s", kind, target)
    return target


def _run(command: Sequence[str], folder: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_LIMIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise NoLibrary(f"{command[0]}: {e}") from e
    if done.returncode:
        raise NoLibrary(f"{command[0]} ended with {done.returncode}: {_first_line(done.stderr)}")


def _sources(pattern: str) -> list[Path]:
    return sorted(_HERE.glob(pattern))


def _first_line(text: str) -> str:
    errors = [line for line in text.splitlines() if "error" in line]
    return (errors or text.splitlines() or ["no message"])[0]


def _is_ours(path: Path) -> bool:
    """Code that others could have written is not loaded: a cache may lie below a folder that all may write."""
    found = path.stat()
    ours = (0, os.geteuid())
    strangers = [at for at in path.absolute().parents if at.stat().st_uid not in ours]  # who owns a folder may swap it
    if found.st_uid in ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not strangers:
        return True
    log.warning("Left out what others may write path=%s", path)
    return False


def _loaded(path: Path) -> ctypes.CDLL:
    import torch  # first: it has the OpenMP whose symbols the library lacks

    log.debug("Loaded the C operations path=%s torch=%s", path, torch.__version__)
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        if "undefined symbol" in str(e) or "file too short" in str(e):  # another compiler's, or half of a file
            with contextlib.suppress(OSError):
                path.unlink()  # the next start makes another
        raise NoLibrary(str(e)) from e


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def main() -> None:
    """`python -m poolwright_engine.native.library FOLDER`: a library for each kind of CPU of this architecture, as
    images have them beside the sources, in `compiled`. Needs no PyTorch."""
    folder = Path(sys.argv[1])
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    kinds = tuple(LEVELS) if platform.machine() == "x86_64" else ("plain",)
    for old in set(folder.glob("*.so")) - {folder / file_name(kind) for kind in kinds}:
        old.unlink(missing_ok=True)  # of other sources
    for kind in kinds:
        try:
            path = folder / file_name(kind)
            print(path if path.exists() else compile_into(folder, kind))
        except NoLibrary as e:
            sys.exit(f"no library for {kind}: {e}")


if __name__ == "__main__":
    main()
