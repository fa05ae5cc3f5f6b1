"""A cluster that somebody lends to the tests, only by naming its kubeconfig in POOLWRIGHT_TEST_KUBECONFIG.

Owns the care for it: it says which server it is, refuses one that already has our CRD or a release of ours, and removes
every namespace that it made. Never reads KUBECONFIG or the default context, which may be production.
"""

import os
from pathlib import Path

from testbed import binaries
from testbed.bed import Cluster
from testbed.progress import Unavailable, say

VARIABLE = "POOLWRIGHT_TEST_KUBECONFIG"
CRD = "inferencepools.poolwright.dev"


class LentCluster(Cluster):
    def __init__(self, kubeconfig: Path) -> None:
        super().__init__(kubeconfig, "", binaries.control_plane_assets() / "kubectl")
        self._namespaces: list[str] = []
        if not kubeconfig.is_file():
            raise Unavailable(f"{VARIABLE}={kubeconfig} is no file")
        self.url = self.kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}").stdout
        say(f"using the cluster at {self.url}, because {VARIABLE} names it")
        if self.kubectl("get", "crd", CRD, check=False).returncode == 0:
            raise Unavailable(f"{self.url} already has the CRD {CRD}; the tests would change it, so they refuse")
        releases = self.kubectl(
            *("get", "secrets,deployments", "-A", "-l", "app.kubernetes.io/part-of=poolwright", "-o", "name")
        ).stdout
        if releases:
            raise Unavailable(f"{self.url} already runs Poolwright ({releases.split()[0]}, …); the tests refuse")

    def close(self) -> None:
        for namespace in self._namespaces:
            self.kubectl("delete", "namespace", namespace, "--ignore-not-found", "--wait=false")

    def _made(self, namespace: str) -> None:
        self._namespaces.append(namespace)


def lent_cluster() -> LentCluster | None:
    named = os.environ.get(VARIABLE)
    return LentCluster(Path(named)) if named else None
