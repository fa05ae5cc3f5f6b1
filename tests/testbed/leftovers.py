"""What a bed could leave on a machine: how to see it and how to remove it.

Owns the names of those places. Refuses to touch anything that does not carry a bed's name.
"""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
WATCHED_FOLDERS = (
    "/var/lib/kubelet",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/log/containers",
    "/var/log/pods",
    "/etc/cni",
    "/run/netns",
)
WATCHED_SETTINGS = (
    "net/ipv4/ip_forward",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "net/netfilter/nf_conntrack_max",
)


def remove_cgroups(name: str, limit_seconds: float = 20) -> None:
    """Removes the bed's groups in every hierarchy, ending what still runs in them."""
    deadline = time.monotonic() + limit_seconds
    while tops := _groups(name):
        for top in tops:
            for group, _, _ in os.walk(top, topdown=False):
                _end_processes(Path(group))
                with contextlib.suppress(OSError):  # still busy: the next round
                    os.rmdir(group)
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _groups(name: str) -> list[Path]:
    return [p for p in (CGROUPS / name, *CGROUPS.glob(f"*/{name}")) if p.is_dir()]


def _end_processes(group: Path) -> None:
    try:
        pids = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    except OSError:
        return
    for pid in pids:
        if pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def snapshot() -> dict[str, str]:
    """The state of this machine that a node changes: firewall, links, routes, mounts, cgroups, settings, folders."""
    seen = {
        "iptables": _output("iptables-save"),
        "links": _output("ip", "-o", "link"),
        "routes": _output("ip", "route"),
        "mounts": "\n".join(
            sorted(
                line.split(" - ")[0].split(" ", 3)[3] for line in Path("/proc/self/mountinfo").read_text().splitlines()
            )
        ),
        "cgroups": "\n".join(
            sorted(str(p) for p in CGROUPS.glob("*")) + sorted(str(p) for p in CGROUPS.glob("*/*") if p.is_dir())
        ),
    }
    for setting in WATCHED_SETTINGS:
        path = Path("/proc/sys") / setting
        seen[setting] = path.read_text().strip() if path.exists() else "absent"
    for folder in WATCHED_FOLDERS:
        seen[folder] = "\n".join(sorted(str(p) for p in Path(folder).rglob("*"))) if Path(folder).exists() else "absent"
    return seen


def _output(*command: str) -> str:
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    # Counters and time stamps are not state.
    return "\n".join(line for line in text.splitlines() if not line.startswith("#") and not line.startswith(":"))
