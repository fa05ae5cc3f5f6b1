"""A Prometheus of local mode's own, where the program is on the PATH: same queries, same reader as on a cluster."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import yaml

from poolwright.local.processes import Process, free_ports

SCRAPE_SECONDS = 2


class LocalPrometheus:
    """Scrapes what `set_targets` lists. Storage lies in the given folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: Process | None = None
        self.url = ""

    @staticmethod
    def available() -> bool:
        return shutil.which("prometheus") is not None

    def set_targets(self, targets: Sequence[str]) -> None:
        """Prometheus reads the file again within seconds of a change."""
        file = self._folder / "targets.json"
        text = json.dumps([{"targets": list(targets)}])
        if not file.exists() or file.read_text() != text:
            fresh = file.with_suffix(".new")
            fresh.write_text(text)
            fresh.replace(file)

    async def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self.set_targets([])
        config = self._folder / "prometheus.yml"
        interval = f"{SCRAPE_SECONDS}s"
        job = {
            "job_name": "poolwright",
            "file_sd_configs": [{"files": [str(self._folder / "targets.json")], "refresh_interval": "1s"}],
        }
        config.write_text(
            yaml.safe_dump(
                {"global": {"scrape_interval": interval, "scrape_timeout": interval}, "scrape_configs": [job]}
            )
        )
        address = f"127.0.0.1:{free_ports(1)[0]}"
        self.url = f"http://{address}"
        self._process = await Process.start(
            [
                shutil.which("prometheus") or "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ],
            {},
            self._folder / "prometheus.log",
        )

    async def ready(self) -> bool:
        """Raises RuntimeError with its last word when it has ended."""
        if self._process and self._process.exit_code is not None:
            raise RuntimeError(f"Prometheus ended: {self._process.last_line()}")
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1)) as session,
                session.get(f"{self.url}/-/ready") as answer,
            ):
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        if self._process:
            self._process.terminate()
            await self._process.wait(10)
