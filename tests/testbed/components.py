"""What each component is started with: files, flags, and how it says that it is ready.

Owns configurations as values. Refuses to start anything.
"""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.certificates import Authority, write_signing_pair
from testbed.folder import BedFolder

SERVICE_CIDR = "10.96.0.0/16"
API_SERVICE_IP = "10.96.0.1"
ETCD_SOCKET = "etcd:1"  # in the bed's folder, which is where every component runs


@dataclass(frozen=True)
class Component:
    name: str
    command: list[str]
    ready: Callable[[], bool]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ControlPlane:
    """etcd, API server, controller manager and scheduler, answering on one address."""

    folder: BedFolder
    assets: Path
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"https://{self.host}:{self.port}"

    def prepare(self) -> None:
        pki = self.folder.certificates
        authority = Authority(pki)
        names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        hosts = [*names, "kubernetes.default.svc.cluster.local", "127.0.0.1", API_SERVICE_IP]
        authority.issue("apiserver", "kube-apiserver", hosts=list(dict.fromkeys([*hosts, self.host])))
        authority.issue("admin", "admin", "system:masters")
        authority.issue("kubelet-client", "kube-apiserver-kubelet-client", "system:masters")
        for component in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
            authority.issue(component, f"system:{component}")
            self.write_kubeconfig(component)
        self.write_kubeconfig("admin", self.folder.kubeconfig)
        write_signing_pair(pki / "service-accounts.key", pki / "service-accounts.pub")
        (self.folder.path / "audit-policy.json").write_text(json.dumps(_AUDIT_POLICY))
        self._issue_node(authority)

    def _issue_node(self, authority: Authority) -> None:
        authority.issue("kubelet", "system:node:node", "system:nodes", hosts=["node", self.host])
        self.write_kubeconfig("kubelet")

    def write_kubeconfig(self, user: str, path: Path | None = None) -> None:
        pki = self.folder.certificates
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "bed", "cluster": {"server": self.url, "certificate-authority": str(pki / "ca.crt")}}
            ],
            "users": [
                {
                    "name": user,
                    "user": {"client-certificate": str(pki / f"{user}.crt"), "client-key": str(pki / f"{user}.key")},
                }
            ],
            "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": user, "namespace": "default"}}],
            "current-context": "bed",
        }
        path = path or self.folder.path / f"{user}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(config))

    def components(self) -> list[Component]:
        """In the order of starting. Prebuilt assets may lack the last two: then no controller and no scheduler runs."""
        every = [self._etcd(), self._api_server(), self._controller_manager(), self._scheduler()]
        return [c for c in every if Path(c.command[0]).exists()]

    def _etcd(self) -> Component:
        # Unix sockets: no port to lose a race for. etcd takes only names with a "port", relative to where it runs.
        client, peer = f"unix://{ETCD_SOCKET}", "unix://etcd-peer:1"
        command = [
            *(str(self.assets / "etcd"), "--name=bed", f"--data-dir={self.folder.path / 'etcd'}"),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=bed={peer}"),
            *("--unsafe-no-fsync", "--log-level=warn"),
        ]
        return Component("etcd", command, lambda: (self.folder.path / ETCD_SOCKET).exists())

    def _api_server(self) -> Component:
        pki = self.folder.certificates
        loopback = self.host.startswith("127.")
        command = [
            *(str(self.assets / "kube-apiserver"), f"--etcd-servers=unix://{ETCD_SOCKET}"),
            *(
                f"--bind-address={self.host}",
                f"--secure-port={self.port}",
                f"--service-cluster-ip-range={SERVICE_CIDR}",
            ),
            # Endpoints may not be loopback; without pods nobody looks for them.
            *(
                ("--advertise-address=192.0.2.1", "--endpoint-reconciler-type=none")
                if loopback
                else (f"--advertise-address={self.host}",)
            ),
            *(f"--tls-cert-file={pki / 'apiserver.crt'}", f"--tls-private-key-file={pki / 'apiserver.key'}"),
            *(f"--client-ca-file={pki / 'ca.crt'}", f"--cert-dir={self.folder.path}"),
            *(f"--service-account-key-file={pki / 'service-accounts.pub'}",),
            *(f"--service-account-signing-key-file={pki / 'service-accounts.key'}",),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            *("--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"),
            *(f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",),
            *(f"--kubelet-client-key={pki / 'kubelet-client.key'}",),
            *(f"--kubelet-certificate-authority={pki / 'ca.crt'}", "--kubelet-preferred-address-types=InternalIP"),
            *(f"--audit-policy-file={self.folder.path / 'audit-policy.json'}", "--audit-log-mode=blocking"),
            *(f"--audit-log-path={self.folder.audit_log}", "--audit-log-maxsize=4096"),
        ]
        return Component("kube-apiserver", command, self.answers)

    def _controller_manager(self) -> Component:
        pki = self.folder.certificates
        command = [
            *(str(self.assets / "kube-controller-manager"), "--secure-port=0", "--leader-elect=false"),
            *(f"--kubeconfig={self.folder.path / 'kube-controller-manager.kubeconfig'}",),
            *("--use-service-account-credentials", f"--root-ca-file={pki / 'ca.crt'}"),
            *(f"--service-account-private-key-file={pki / 'service-accounts.key'}",),
            # A node that died in a test is to be noticed within the test.
            *("--node-monitor-period=2s", "--node-monitor-grace-period=20s"),
        ]
        return Component(
            "kube-controller-manager", command, lambda: self.has("/api/v1/namespaces/default/serviceaccounts/default")
        )

    def _scheduler(self) -> Component:
        command = [
            *(str(self.assets / "kube-scheduler"), "--secure-port=0", "--leader-elect=false"),
            *(f"--kubeconfig={self.folder.path / 'kube-scheduler.kubeconfig'}",),
        ]
        return Component("kube-scheduler", command, lambda: True)

    def answers(self) -> bool:
        return self.has("/readyz")

    def has(self, path: str) -> bool:
        return self.get(path) is not None

    def get(self, path: str) -> Any:
        """The body as admin, or None while it is not to be had."""
        pki = self.folder.certificates
        context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        try:
            with urllib.request.urlopen(self.url + path, timeout=2, context=context) as answer:  # noqa: S310
                return answer.read()
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return None


# Secrets' bodies stay out; for every other write both bodies are kept, so that a test can say what was changed.
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {
            "level": "Metadata",
            "resources": [
                {"group": "", "resources": ["secrets", "serviceaccounts/token"]},
                {"group": "authentication.k8s.io", "resources": ["tokenreviews"]},
            ],
        },
        {"level": "RequestResponse", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
        {"level": "Metadata"},
    ],
}
