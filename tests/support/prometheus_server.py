"""A real Prometheus on a free port with storage of its own, scraping what it is told to."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from poolwright.local.processes import free_ports
from support import required

_START_SECONDS = 30.0


@contextmanager
def running(folder: Path, jobs: dict[str, Sequence[str]], scrape_interval: str = "250ms") -> Iterator[str]:
    """`jobs` maps a job's name to its targets. Gives the server's URL."""
    program = required.binary("prometheus", "prometheus")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "global": {"scrape_interval": scrape_interval, "scrape_timeout": scrape_interval},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(targets)}]} for job, targets in jobs.items()
        ],
    }
    config_file = folder / "prometheus.yml"
    config_file.write_text(yaml.safe_dump(config))
    port = free_ports(1)[0]
    log_file = folder / "prometheus.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config_file}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process, log_file)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log_file: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"prometheus ended with {process.returncode}: {log_file.read_text()}")
        try:
            if httpx.get(f"{url}/-/ready", trust_env=False, timeout=1).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"prometheus was not ready after {_START_SECONDS} s: {log_file.read_text()}")
