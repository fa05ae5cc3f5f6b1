"""A node inside the bed's own namespaces: its network, its mounts, and what runs on it.

Owns everything that a node changes on a machine, and keeps all of it where it ends with the namespaces; only cgroups
are the machine's, in one group that carries the bed's name. Runs inside the namespaces, in their first process.
"""

import json
import socket
import subprocess
from pathlib import Path

from testbed.components import Component, ControlPlane
from testbed.folder import BedFolder
from testbed.leftovers import CGROUPS

BRIDGE_IP = "10.88.0.1"
POD_CIDR = "10.88.0.0/16"
TESTPOD_IMAGE = "poolwright.dev/testbed/testpod:1"  # the sandbox of every pod, and what the bed's own tests run
CNI_PROGRAMS = Path("/usr/lib/cni")
# Kubelet and containerd write here; inside the namespaces these are empty file systems in memory.
HIDDEN_FOLDERS = ("/run", "/var/lib/kubelet", "/var/lib/cni", "/var/log/containers", "/var/log/pods", "/etc/cni")
# What kubelet would set for the whole machine. It finds them set, in files that only it sees.
SETTINGS_AS_KUBELET_WANTS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def prepare_namespaces(folder: BedFolder) -> None:
    _mounts(folder)
    for command in (
        "ip link set lo up",
        "ip link add cbr0 type bridge",
        f"ip addr add {BRIDGE_IP}/16 dev cbr0",
        "ip link set cbr0 up",
        "ip route add default dev cbr0",  # without it Service addresses are unreachable from the node itself
    ):
        _run(*command.split())
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    _make_cgroups(folder.name)


def _mounts(folder: BedFolder) -> None:
    _run("mount", "--make-rprivate", "/")
    _run("mount", "--make-rshared", "/")
    # A mount point that is missing is made in a layer of our own, so that the machine does not get it.
    missing = [Path(hidden) for hidden in HIDDEN_FOLDERS if not Path(hidden).exists()]
    for parent in {path.parent for path in missing}:
        _cover(parent, folder)
    for path in missing:
        path.mkdir()
    for hidden in HIDDEN_FOLDERS:
        _run("mount", "-t", "tmpfs", "-o", "mode=755", "testbed", hidden)
    settings = folder.path / "settings"
    settings.mkdir()
    for name, value in SETTINGS_AS_KUBELET_WANTS.items():
        seen = settings / name.replace("/", "-")
        seen.write_text(f"{value}\n")
        _run("mount", "--bind", str(seen), f"/proc/sys/{name}")


def _cover(parent: Path, folder: BedFolder) -> None:
    layers = folder.path / "layers" / str(parent).strip("/").replace("/", "-")
    (layers / "upper").mkdir(parents=True)
    (layers / "work").mkdir()
    options = f"lowerdir={parent},upperdir={layers / 'upper'},workdir={layers / 'work'}"
    _run("mount", "-t", "overlay", "-o", options, "testbed", str(parent))


def cgroup_hierarchies() -> list[Path]:
    """The roots under which a group has to be made: one with cgroup v2, one for each controller with v1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [p for p in sorted(CGROUPS.iterdir()) if p.is_dir() and not p.is_symlink() and (p / "cgroup.procs").exists()]


def _make_cgroups(name: str) -> None:
    for hierarchy in cgroup_hierarchies():
        group = hierarchy / name
        group.mkdir()
        if (hierarchy / "cgroup.subtree_control").exists() and hierarchy == CGROUPS:
            controllers = (hierarchy / "cgroup.controllers").read_text().split()
            for controller in controllers:
                try:
                    (hierarchy / "cgroup.subtree_control").write_text(f"+{controller}")
                    (group / "cgroup.subtree_control").write_text(f"+{controller}")
                except OSError:
                    continue  # kubelet says which one it misses
        for inherited in ("cpuset.cpus", "cpuset.mems"):
            if hierarchy.name == "cpuset" and (group / inherited).exists():
                (group / inherited).write_text((hierarchy / inherited).read_text())


def components(folder: BedFolder, assets: Path, plane: ControlPlane) -> list[Component]:
    _write_files(folder, plane)
    containerd = Component(
        "containerd",
        ["containerd", f"--config={folder.path / 'containerd.toml'}"],
        lambda: _listens(Path("/run/containerd/containerd.sock")) and _imported_own_image(folder),
    )
    kubelet = Component(
        "kubelet",
        [
            *(str(assets / "kubelet"), f"--config={folder.path / 'kubelet.json'}"),
            *(f"--kubeconfig={folder.path / 'kubelet.kubeconfig'}", "--hostname-override=node"),
            *(f"--node-ip={BRIDGE_IP}", "--root-dir=/var/lib/kubelet", "--v=1"),
        ],
        lambda: _node_is_ready(plane),
    )
    proxy = Component(
        "kube-proxy",
        [str(assets / "kube-proxy"), f"--config={folder.path / 'kube-proxy.json'}", "--hostname-override=node"],
        lambda: (
            "KUBE-SERVICES" in subprocess.run(["iptables", "-t", "nat", "-S"], capture_output=True, text=True).stdout
        ),
    )
    return [containerd, kubelet, proxy]


def _write_files(folder: BedFolder, plane: ControlPlane) -> None:
    pki = folder.certificates
    kubelet = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": BRIDGE_IP,
        "healthzBindAddress": "127.0.0.1",
        "readOnlyPort": 0,
        "tlsCertFile": str(pki / "kubelet.crt"),
        "tlsPrivateKeyFile": str(pki / "kubelet.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{folder.name}",
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "podCIDR": POD_CIDR,
        "resolvConf": "",
        "maxPods": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 99,
        "imageGCLowThresholdPercent": 98,
        "syncFrequency": "10s",
        "nodeStatusUpdateFrequency": "4s",
        "serializeImagePulls": False,
        "shutdownGracePeriod": "0s",
    }
    (folder.path / "kubelet.json").write_text(json.dumps(kubelet))
    proxy = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clusterCIDR": POD_CIDR,
        "bindAddress": BRIDGE_IP,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "oomScoreAdj": 0,
        "clientConnection": {"kubeconfig": str(folder.path / "kube-proxy.kubeconfig")},
        "conntrack": {"maxPerCore": 0, "min": 0},  # the table's size is the machine's
    }
    (folder.path / "kube-proxy.json").write_text(json.dumps(proxy))
    network = {
        "cniVersion": "0.4.0",
        "name": "testbed",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cbr0",
                "isGateway": True,
                "ipMasq": False,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": POD_CIDR, "rangeStart": "10.88.1.1", "gateway": BRIDGE_IP}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }
    Path("/etc/cni/net.d").mkdir(parents=True)
    Path("/etc/cni/net.d/10-testbed.conflist").write_text(json.dumps(network))
    (folder.path / "containerd.toml").write_text(
        f'''version = 2
root = "{folder.path}/containerd"
state = "/run/containerd"
oom_score = 0

[grpc]
address = "/run/containerd/containerd.sock"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{TESTPOD_IMAGE}"
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{CNI_PROGRAMS}"
conf_dir = "/etc/cni/net.d"
'''
    )


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _imported_own_image(folder: BedFolder) -> bool:
    archive = folder.path / "testpod.tar"
    done = subprocess.run(["ctr", "-n", "k8s.io", "images", "import", str(archive)], capture_output=True, check=False)
    return done.returncode == 0


def _node_is_ready(plane: ControlPlane) -> bool:
    body = plane.get("/api/v1/nodes/node")
    conditions = json.loads(body)["status"].get("conditions", []) if body else []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
