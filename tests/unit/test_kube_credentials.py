"""What is no kubeconfig is said in one line, never as a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from poolwright.kube import KubeClient
from poolwright.machines import Unavailable
from poolwright_protocol import names

BROKEN = {
    "no YAML": b"a: [",
    "a list": b"- a\n- b\n",
    "a word": b"config",
    "contexts that are none": b"apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: 7\nclusters: 7\nusers: 7\n",
    "no text": b"\xff\xfe\x00\x81",
    "empty": b"",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
async def test_a_broken_kubeconfig_is_named_in_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config"
    file.write_bytes(content)
    with pytest.raises(Unavailable) as refused:
        await KubeClient.connect(str(file))
    assert str(refused.value).startswith("no Kubernetes credentials: ")
    assert "\n" not in str(refused.value)


def test_a_router_with_a_broken_kubeconfig_says_so(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_bytes(BROKEN["no YAML"])
    pool = {names.ENV_POOL: "chat", names.ENV_POOL_NAMESPACE: "llm", names.ENV_POOL_KEY: "ab" * 32}
    environment = {k: v for k, v in os.environ.items() if k != "KUBERNETES_SERVICE_HOST"} | pool
    router = subprocess.run(
        [sys.executable, "-m", "poolwright.router", "--port=0", "--host=127.0.0.1"],
        env=environment | {"KUBECONFIG": str(file)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert router.returncode == 2
    assert f"poolwright router: no Kubernetes credentials: {file} is no kubeconfig: " in router.stderr
    assert "Traceback" not in router.stderr
