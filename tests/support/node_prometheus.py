"""A real Prometheus beside the pods of a node bed, which scrapes routers and engines as an installation is told to.

Its Debian build has no discovery through Kubernetes, so a file names the pods; all labels are the programs' own.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from poolwright_protocol import names
from support import required
from support.pod_history import Pods
from testbed.bed import NodeBed
from testbed.node import BRIDGE_IP

PORT = 9090
_PORTS = {names.COMPONENT_ROUTER: names.ROUTER_PORT, names.COMPONENT_ENGINE: names.API_PORT}


class NodePrometheus:
    """`url` is good on the node and in pods."""

    url = f"http://{BRIDGE_IP}:{PORT}"

    def __init__(self, targets: Path) -> None:
        self._targets = targets
        self.scrape([])

    def pods_changed(self, pods: Pods) -> None:
        self.scrape(
            sorted(
                f"{pod['status']['podIP']}:{_PORTS[pod['metadata']['labels'][names.LABEL_COMPONENT]]}"
                for pod in pods.values()
                if pod.get("status", {}).get("podIP")
            )
        )

    def scrape(self, targets: list[str]) -> None:
        new = self._targets.with_suffix(".new")
        new.write_text(json.dumps([{"targets": targets}]))
        os.replace(new, self._targets)


@contextmanager
def running(bed: NodeBed, folder: Path, scrape_interval: str = "2s") -> Iterator[NodePrometheus]:
    program = required.binary("prometheus", "prometheus")
    folder.mkdir()
    server = NodePrometheus(folder / "targets.json")
    config = {
        "global": {"scrape_interval": scrape_interval, "scrape_timeout": scrape_interval},
        "scrape_configs": [
            {
                "job_name": "poolwright",
                "file_sd_configs": [{"files": [str(folder / "targets.json")], "refresh_interval": "2s"}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    log_file = folder / "prometheus.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            bed.inside(
                [
                    program,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={BRIDGE_IP}:{PORT}",
                    "--log.level=warn",
                ]
            ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 30
        with bed.forward(BRIDGE_IP, PORT) as port:
            while not _is_ready(f"http://127.0.0.1:{port}"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"prometheus is not ready: {log_file.read_text()}")
                time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(20)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", trust_env=False, timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
