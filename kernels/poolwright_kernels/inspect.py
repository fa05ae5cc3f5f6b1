"""`python -m poolwright_kernels.inspect`: what the kernels are compiled to, for machines that are not here.

Prints the tables that are checked in, what is wrong with them, and how many rows they lack. With `--compile`, compiles
what neither they nor the cache have yet, for every target and with every version of Triton, each in a process of its
own, and writes the tables. It may be stopped and started again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from poolwright_kernels.ahead_of_time import TARGETS, Compiled, compile_case
from poolwright_kernels.compiled_table import (
    NAMED_SPILLS,
    PATHS,
    TRITON_VERSIONS,
    Key,
    case_digest,
    current_rows,
    faults,
    keys,
    packed,
    subjects,
    unpacked,
    write_table,
)

_LONGEST_COMPILATION_SECONDS = 600.0


class CompilationFailed(Exception):
    """A case that Triton or the assembler refused, or that took too long."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m poolwright_kernels.inspect", description=__doc__)
    parser.add_argument("--compile", action="store_true", help="compile what is missing, then write the tables")
    parser.add_argument("--triton", action="append", metavar="VERSION", choices=TRITON_VERSIONS, help="only this one")
    parser.add_argument("--target", action="append", metavar="SM", type=int, choices=TARGETS, help="only this one")
    parser.add_argument("--only", metavar="TEXT", default="", help="only subjects with all of these words")
    parser.add_argument("--table", metavar="NAME", choices=PATHS, help="only this one: operations or attention")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="compilations at a time (default: 1)")
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="begin no compilation after this; write what there is"
    )
    parser.add_argument("--faults", action="store_true", help="print only rows with which something is wrong")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return work()
    chosen = [
        key
        for key in keys(options.table)
        if key[1] in (options.triton or TRITON_VERSIONS)
        and key[2] in (options.target or TARGETS)
        and all(word in key[0].split() for word in options.only.split())
    ]
    stored = {key: row for family, path in PATHS.items() for key, row in current_rows(family, path).items()}
    cache = Cache()
    cache.rows |= {case_digest(key): row for key, row in stored.items()}
    if options.compile:
        rows = compile_missing(chosen, cache, options.jobs, options.minutes)
        write_tables(cache)
    else:
        rows = {key: stored[key] for key in chosen if key in stored}
    wrong = print_table(rows, only_faults=options.faults)
    print(f"{len(rows)} rows, {wrong} with a fault; named spills: {len(NAMED_SPILLS)}")
    if missing := len(chosen) - len(rows):
        print(f"UNPROVEN: {missing} of {len(chosen)} rows are not compiled")
    return 1 if wrong or missing else 0


def print_table(rows: dict[Key, Compiled], only_faults: bool = False) -> int:
    """Returns how many rows have a fault."""
    width = max((len(name) for name, _, _ in rows), default=0)
    print(
        f"{'subject':{width}}  triton  sm   regs  stack   shared  tmem  occ  load/store  loops: matrix instructions +"
        " asynchronous copies"
    )
    wrong = 0
    for key, row in rows.items():
        problems = faults(key, row)
        wrong += bool(problems)
        if only_faults and not problems:
            continue
        name, version, target = key
        loops = "  ".join(
            "/".join(f"{count} {kind}" for kind, count in loop.matrix) + f"+{loop.asynchronous_copies}"
            for loop in row.loops
            if loop.matrix
        )
        print(
            f"{name:{width}}  {version:6}  {target:<3}  {row.registers:4}  {row.stack_bytes:5}  {row.shared_bytes:7}  "
            f"{row.tensor_columns:4}  {row.occupancy:3}  {row.widest_load_bits:4}/{row.widest_store_bits:<4}   {loops}"
            + (f"   !! {'; '.join(problems)}" if problems else "")
        )
    return wrong


@dataclass
class Cache:
    """Rows that were compiled on this machine, a line each, by the digest of their case. Only ever added to."""

    path: Path = field(default_factory=lambda: cache_folder() / "compiled.jsonl")
    rows: dict[str, Compiled] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                with suppress(ValueError):  # a line cut short when the machine stopped
                    digest, row = json.loads(line)
                    self.rows[digest] = unpacked(row)

    def add(self, digest: str, row: Compiled) -> None:
        with self._lock:
            self.rows[digest] = row
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps([digest, packed(row)], separators=(",", ":")) + "\n")


def write_tables(cache: Cache) -> None:
    """With all rows that there are; a table without any is not made."""
    for family, path in PATHS.items():
        if rows := {key: row for key in keys(family) if (row := cache.rows.get(case_digest(key))) is not None}:
            write_table(family, rows, path)


def compile_missing(
    chosen: Sequence[Key],
    cache: Cache,
    jobs: int = 1,
    minutes: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[Key, Compiled]:
    """Rows of what was chosen, from the cache or compiled now. What cannot be compiled is told and left out, as is what
    has not begun when the time is over."""
    digests = {key: case_digest(key) for key in chosen}
    todo = telling_first([key for key in chosen if digests[key] not in cache.rows])
    for version in dict.fromkeys(version for _, version, _ in todo):
        triton_folder(version)
    ends = None if minutes is None else clock() + 60 * minutes
    progress = Progress(len(todo), len(chosen))
    queue: Iterator[Key] = iter(todo)
    lock = threading.Lock()

    def compile_from_queue() -> None:
        workers: dict[str, Worker] = {}
        try:
            while ends is None or clock() < ends:
                with lock:
                    key = next(queue, None)
                if key is None:
                    return
                version = key[1]
                if version not in workers:
                    workers[version] = Worker(version)
                progress.begin(key)
                try:
                    row = workers[version].compile(key)
                    cache.add(digests[key], row)
                    if found := faults(key, row):
                        progress.say(f"{' '.join(map(str, key))}: {'; '.join(found)}")
                except CompilationFailed as failure:
                    progress.say(f"{' '.join(map(str, key))}: {failure}")
                    workers.pop(version).close()
                progress.end()
        finally:
            for worker in workers.values():
                worker.close()

    threads = [threading.Thread(target=compile_from_queue) for _ in range(min(jobs, len(todo)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    progress.close()
    return {key: cache.rows[digest] for key, digest in digests.items() if digest in cache.rows}


def telling_first(rows: Sequence[Key]) -> list[Key]:
    """Launches of two loops first, where faults are; else in an order that has nothing to do with what rows are: a run
    that is cut short has seen some of everything."""
    return sorted(rows, key=lambda key: (not key[0].startswith("attention mixed"), case_digest(key)))


class Worker:
    """A process that has one version of Triton and compiles one case after another."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._folder = tempfile.TemporaryDirectory(prefix="poolwright-triton-")
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = self._folder.name
        if (folder := triton_folder(version)) is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        self._errors = Path(self._folder.name) / "errors"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "poolwright_kernels.inspect", "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )

    def compile(self, key: Key) -> Compiled:
        """Raises CompilationFailed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(_LONGEST_COMPILATION_SECONDS, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(key) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            raise CompilationFailed(f"the compiling process ended: {self._errors.read_text()[-2000:]}")
        # What Triton keeps of a case is not asked for again, and all of them are gigabytes.
        for entry in Path(self._folder.name).iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
        version, digest, row, error = json.loads(answer)
        if version != self.version:
            raise CompilationFailed(f"compiled by Triton {version}, not {self.version}")
        if error is not None:
            raise CompilationFailed(error)
        if digest != case_digest(key):
            raise CompilationFailed("the kernels changed while they were compiled: start again")
        return unpacked(row)

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait(timeout=60)
        self._folder.cleanup()


def work() -> int:
    """The other side of `Worker`: a key on each line of stdin, a row or an error on each line of stdout."""
    import triton

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what Triton prints is no answer
    for line in sys.stdin:
        name, version, target = json.loads(line)
        row, error = None, None
        try:
            row = packed(compile_case(subjects()[name].case(target), target))
        except Exception as failure:  # of a compiler anything may come; it is told by name, and the next case tried
            error = f"{type(failure).__name__}: {failure}"
        digest = case_digest((name, version, target))
        answers.write(json.dumps([triton.__version__, digest, row, error]) + "\n")
        answers.flush()
    return 0


def cache_folder() -> Path:
    """`${XDG_CACHE_HOME:-~/.cache}/poolwright/triton`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "poolwright" / "triton"


def triton_folder(version: str) -> Path | None:
    """Where this version of Triton is, installed first if need be; None: it is the one of this environment."""
    with suppress(metadata.PackageNotFoundError):
        if metadata.version("triton") == version:
            return None
    folder = cache_folder() / version
    if not (folder / f"triton-{version}.dist-info").exists():
        print(f"Installing Triton {version} into {folder}", file=sys.stderr)
        partial = folder.with_name(f"{version}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial)]
        subprocess.run([*pip, f"triton=={version}"], check=True)
        partial.rename(folder)
    return folder


class Progress:
    """How far it is and how long it will take, on stderr: one line that changes on a terminal, else now and then."""

    def __init__(self, todo: int, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._todo, self._total, self._done = todo, total, 0
        self._clock = clock
        self._began = self._said = clock()
        self._lock = threading.Lock()

    def begin(self, key: Key) -> None:
        with self._lock:
            now = self._clock()
            if not sys.stderr.isatty() and now - self._said < 60:
                return
            self._said = now
            share = (self._total - self._todo + self._done) / self._total
            left = (now - self._began) / self._done * (self._todo - self._done) if self._done else 0.0
            text = f"{share:4.0%}  {self._done}/{self._todo}  {left / 60:.0f} min left  {' '.join(map(str, key))}"
            if sys.stderr.isatty():
                print(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
            else:
                print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        with self._lock:
            self._done += 1

    def say(self, text: str) -> None:
        with self._lock:
            print(f"\r\033[K{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._todo and sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
