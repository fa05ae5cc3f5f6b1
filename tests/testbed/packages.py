"""The Debian packages that a node and its images need.

Owns which package brings which program, and installs what is missing where that is possible: as root, with apt-get.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

from testbed.cache import cache_root, locked
from testbed.progress import Unavailable, say

# What a program or file is brought by.
NODE = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "socat": "socat",
    "ip": "iproute2",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "unshare": "util-linux",
    "mount": "mount",
}
IMAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}
ATTEMPTS = 4
LOCK_WAIT_SECONDS = 300


def ensure(programs: dict[str, str]) -> None:
    """Installs the packages of the programs that are missing, or says what is missing and why it stays so."""
    if not (missing := _missing(programs)):
        return
    packages = sorted({programs[name] for name in missing})
    wanted = f"missing {', '.join(missing)}: install the packages {' '.join(packages)}"
    if os.getuid() != 0:
        raise Unavailable(f"{wanted} (only root may, and this is user {os.getuid()})")
    if shutil.which("apt-get") is None:
        raise Unavailable(f"{wanted} (there is no apt-get here; names are Debian's)")
    with locked(cache_root() / "apt.lock", "installing packages"):
        if _missing(programs):
            say(f"installing {' '.join(packages)} with apt-get, about a minute")
            _apt_get(packages)
    if still := _missing(programs):
        raise Unavailable(f"still missing after apt-get: {', '.join(still)}")


def _missing(programs: dict[str, str]) -> list[str]:
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [p for p in programs if not (Path(p).exists() if p.startswith("/") else shutil.which(p, path=path))]


def _apt_get(packages: list[str]) -> None:
    options = ["-q", "-y", "-o", f"DPkg::Lock::Timeout={LOCK_WAIT_SECONDS}", "-o", "Acquire::Retries=3"]
    # RUNLEVEL=1 keeps init scripts from starting what a package brings, where the machine has an init at all.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    said = ""
    for attempt in range(ATTEMPTS):
        if attempt > 0:
            subprocess.run(["apt-get", "update", *options[:2]], env=environment, capture_output=True, check=False)
        done = subprocess.run(
            ["apt-get", "install", "--no-install-recommends", *options, *packages],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return
        said = done.stdout
        time.sleep(2**attempt)
    raise Unavailable(f"apt-get could not install {' '.join(packages)}:\n{said[-2000:]}")
