"""Compiles Kubernetes, Helm and the test pod's program from Go modules, once per machine.

Owns the versions (they are read from go.mod) and the build flags. Refuses to know how the programs are run.
"""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from testbed.cache import build_once, digest, find
from testbed.progress import Unavailable, say

SOURCE = Path(__file__).parent / "binaries"
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
BUILD_LIMIT_SECONDS = 3600


def kubernetes_version() -> str:
    return _required("k8s.io/kubernetes", SOURCE / "go.mod")


def helm_version() -> str:
    return _required("helm.sh/helm/v3", SOURCE / "helm" / "go.mod")


def kubernetes() -> Path:
    """The folder with etcd and every Kubernetes component, all links to one program."""
    version = kubernetes_version()
    major, minor, _ = version.removeprefix("v").split(".")
    stamp = " ".join(
        f"-X {package}.{name}={value}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        for name, value in (("gitVersion", version), ("gitMajor", major), ("gitMinor", minor))
    )

    def build(folder: Path) -> None:
        _go_build(SOURCE, ".", folder / "hyperkube", stamp)
        for component in COMPONENTS:
            (folder / component).symlink_to("hyperkube")

    doing = f"compiling Kubernetes {version.removeprefix('v')}, 11 min on 2 cores the first time"
    return build_once("kubernetes", _kubernetes_key(), doing, build)


def kubernetes_is_built() -> bool:
    return find("kubernetes", _kubernetes_key()) is not None


def helm() -> Path:
    """The helm program."""
    version = helm_version()
    module = SOURCE / "helm"
    key = digest("flags 2", module / "go.mod", module / "go.sum")
    # Unstamped it takes itself for a client of Kubernetes 1.20, and renders for that.
    minor = _required("k8s.io/client-go", module / "go.mod").split(".")[1]
    stamp = " ".join(
        [f"-X helm.sh/helm/v3/internal/version.version={version}"]
        + [
            f"-X helm.sh/helm/v3/pkg/{package}.k8sVersion{name}={value}"
            for package in ("chartutil", "lint/rules")
            for name, value in (("Major", "1"), ("Minor", minor))
        ]
    )
    doing = f"compiling Helm {version.removeprefix('v')}, 4 min on 2 cores the first time"
    return (
        build_once("helm", key, doing, lambda f: _go_build(module, "helm.sh/helm/v3/cmd/helm", f / "helm", stamp))
        / "helm"
    )


def testpod() -> Path:
    """The program inside the bed's own pod image."""
    key = digest("flags 1", SOURCE / "testpod" / "main.go")
    doing = "compiling the test pod's program"
    return build_once("testpod", key, doing, lambda f: _go_build(SOURCE, "./testpod", f / "testpod", "")) / "testpod"


def control_plane_assets() -> Path:
    """Where etcd, kube-apiserver and kubectl are: `KUBEBUILDER_ASSETS` where it is set, else our own build."""
    given = os.environ.get("KUBEBUILDER_ASSETS")
    if not given:
        return kubernetes()
    folder = Path(given)
    missing = [name for name in ("etcd", "kube-apiserver", "kubectl") if not (folder / name).exists()]
    if missing:
        raise Unavailable(f"KUBEBUILDER_ASSETS={given} holds no {', '.join(missing)}")
    return folder


def _kubernetes_key() -> str:
    return digest("flags 1", kubernetes_version(), SOURCE / "main.go", SOURCE / "go.mod", SOURCE / "go.sum")


def _required(module: str, go_mod: Path) -> str:
    found = re.search(rf"^\s*{re.escape(module)} (v?\d\S*)", go_mod.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{go_mod} requires no {module}")
    return found[1]


def _go_build(module: Path, package: str, output: Path, stamp: str) -> None:
    go = shutil.which("go")
    if go is None:
        raise Unavailable(
            f"the test bed compiles Kubernetes and needs Go {_required('go', module / 'go.mod')} or newer on the PATH; "
            "or point KUBEBUILDER_ASSETS at a folder with etcd, kube-apiserver and kubectl"
        )
    command = [go, "build", "-trimpath", "-ldflags", f"-s -w {stamp}".strip(), "-o", str(output), package]
    log = output.with_suffix(".log")
    started = last_said = time.monotonic()
    with log.open("wb") as out:
        # A polite neighbour: tests that need no cluster run while this compiles.
        process = subprocess.Popen(
            ["nice", "-n", "15", *command], cwd=module, stdout=out, stderr=out, env={**os.environ, "CGO_ENABLED": "0"}
        )
        try:
            while process.poll() is None:
                if time.monotonic() - started > BUILD_LIMIT_SECONDS:
                    raise Unavailable(f"compiling {package} took more than {BUILD_LIMIT_SECONDS} s")
                if time.monotonic() - last_said > 60:
                    last_said = time.monotonic()
                    say(f"still compiling {output.name}, {(last_said - started) / 60:.0f} min so far")
                try:
                    process.wait(timeout=1)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    text = log.read_text(errors="replace")
    if process.returncode != 0:
        raise Unavailable(f"compiling {package} failed:\n{text[-3000:]}")
    log.unlink()
    say(f"compiled {output.name} in {time.monotonic() - started:.0f} s")
