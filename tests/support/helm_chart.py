"""Helm on this repository's chart: rendered without a cluster, or installed on one. No state outside its folder."""

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "helm" / "poolwright"
REPOSITORY = "none.invalid/poolwright"
Objects = list[dict[str, Any]]


class Helm:
    def __init__(
        self,
        program: Path,
        folder: Path,
        kubeconfig: Path | None = None,
        chart: Path = CHART,
        wrapped: Callable[[list[str]], list[str]] = list,
    ) -> None:
        """`wrapped` makes the command line that runs another one where the cluster is reached."""
        self._program = program
        self._folder = folder
        self._kubeconfig = kubeconfig
        self.chart = chart
        self._wrapped = wrapped

    def run(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """On failure raises with what it said, unless `check` is off."""
        places = {f"HELM_{name}_HOME": str(self._folder / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
        kubeconfig = str(self._kubeconfig or self._folder / "none")
        done = subprocess.run(
            self._wrapped([str(self._program), *arguments]),
            env={**os.environ, **places, "KUBECONFIG": kubeconfig},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"helm {' '.join(arguments)} exited with {done.returncode}:\n{done.stderr}")
        return done

    def template(self, *values: str, release: str = "pw", namespace: str = "system") -> Objects:
        """The objects that `helm template` prints; `values` as for --set, after an image.repository."""
        done = self.run("template", release, str(self.chart), "--namespace", namespace, *set_values(values))
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    def install(
        self, release: str, namespace: str, *values: str, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        return self.run("install", release, str(self.chart), "--namespace", namespace, *set_values(values), check=check)

    def upgrade(self, release: str, namespace: str, *values: str) -> None:
        self.run("upgrade", release, str(self.chart), "--namespace", namespace, *set_values(values))

    def uninstall(self, release: str, namespace: str) -> None:
        self.run("uninstall", release, "--namespace", namespace, "--wait", "--timeout=60s")


def set_values(values: Sequence[str]) -> list[str]:
    return [f"--set={value}" for value in (f"image.repository={REPOSITORY}", *values)]


def of_kind(objects: Objects, kind: str) -> Objects:
    return [found for found in objects if found["kind"] == kind]


def the(objects: Objects, kind: str, name_end: str = "") -> dict[str, Any]:
    """The only object of a kind whose name ends so."""
    (found,) = [o for o in of_kind(objects, kind) if o["metadata"]["name"].endswith(name_end)]
    return found
