"""Outlives its owner just long enough to leave nothing behind.

Owns the lock on a bed's folder, the runner's process, and the cleaning of the machine afterwards. The owner's death is
the end of file on standard input, which the runner reads; the keeper's own death kills the runner, and the next bed
sweeps what was left.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from testbed.folder import BedFolder, all_beds, beds_root
from testbed.leftovers import remove_cgroups
from testbed.runner import die_with_parent


def sweep() -> list[str]:
    """Removes the beds whose keeper died without cleaning; returns their names."""
    swept = []
    for folder in all_beds():
        lock = folder.hold() if folder.path.exists() else None
        if lock is not None:
            with lock:
                clean(folder)
            swept.append(folder.path.name)
    return swept


def clean(folder: BedFolder) -> None:
    remove_cgroups(folder.name)
    shutil.rmtree(folder.path, ignore_errors=True)
    with contextlib.suppress(OSError):  # other beds are in it
        beds_root().rmdir()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--with-node", action="store_true")
    arguments = parser.parse_args()
    folder = BedFolder(arguments.folder)
    lock = folder.hold()
    if lock is None:
        print(f"{folder.path} belongs to another keeper", file=sys.stderr)
        return 1
    with lock:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        command = [sys.executable, "-m", "testbed.runner", "--folder", str(folder.path)]
        command += ["--assets", str(arguments.assets)]
        if arguments.with_node:
            command = [
                *("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--"),
                *(*command, "--with-node"),
            ]
        runner = subprocess.Popen(command, preexec_fn=die_with_parent)
        signal.signal(signal.SIGTERM, lambda *_: runner.kill() if arguments.with_node else runner.terminate())
        try:
            if arguments.with_node:
                folder.init_pid.write_text(str(_first_child(runner)))
            code = runner.wait()
        finally:
            if runner.poll() is None:
                runner.kill()
                runner.wait()
            clean(folder)
    return code


def _first_child(unshare: "subprocess.Popen[bytes]") -> int:
    children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
    while unshare.poll() is None:
        found = children.read_text().split()
        if found:
            return int(found[0])
        time.sleep(0.01)
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
