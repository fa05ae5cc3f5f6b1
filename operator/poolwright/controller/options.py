"""The operator's command line and environment, checked once, as one frozen value."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from poolwright.controller.prometheus import PrometheusAccess
from poolwright.controller.render import Images
from poolwright_protocol import names

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Options:
    namespaces: tuple[str, ...]  # empty: all
    images: Images
    root_secret: bytes
    prometheus: PrometheusAccess | None
    lease_namespace: str
    lease_name: str
    lease_duration_seconds: int
    probe_host: str
    probe_port: int
    log_level: str
    kubeconfig: str | None
    context: str | None


def parse(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> Options:
    """Exits with status 2 and one line that names the option, as argparse does."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if bool(given.namespace) == given.all_namespaces:
        parser.error("give either --namespace, once or more, or --all-namespaces")
    root_secret = environment.get(names.ENV_ROOT_SECRET, "").strip().encode()
    if len(root_secret) < 16:
        parser.error(f"{names.ENV_ROOT_SECRET} must hold at least 16 bytes")
    if given.lease_duration_seconds < 3:
        parser.error("--lease-duration-seconds must be at least 3")
    access = None
    if given.prometheus_url:
        access = PrometheusAccess(
            given.prometheus_url,
            bearer_token_file=given.prometheus_token_file,
            ca_file=given.prometheus_ca_file,
            insecure_skip_verify=given.prometheus_insecure_skip_verify,
            timeout_seconds=given.prometheus_timeout_seconds,
        )
    return Options(
        namespaces=tuple(dict.fromkeys(given.namespace)),
        images=Images(
            engine=given.engine_image,
            router=given.router_image,
            pull_policy=given.image_pull_policy,
            pull_secrets=tuple(given.image_pull_secret),
        ),
        root_secret=root_secret,
        prometheus=access,
        lease_namespace=given.lease_namespace or own_namespace() or next(iter(given.namespace), "default"),
        lease_name=given.lease_name,
        lease_duration_seconds=given.lease_duration_seconds,
        probe_host=given.probe_host,
        probe_port=given.probe_port,
        log_level=given.log_level,
        kubeconfig=given.kubeconfig,
        context=given.context,
    )


def own_namespace() -> str | None:
    """The namespace of the pod this runs in."""
    try:
        return _NAMESPACE_FILE.read_text().strip() or None
    except OSError:
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="poolwright operator",
        description="Keep InferencePools: their children, their roles, their moves and their status.",
        epilog=f"The environment gives {names.ENV_ROOT_SECRET}, from which the key of every pool is derived.",
    )
    scope = parser.add_argument_group("scope")
    scope.add_argument("--namespace", action="append", default=[], help="serve this namespace; may be repeated")
    scope.add_argument("--all-namespaces", action="store_true", help="serve the whole cluster")
    images = parser.add_argument_group("images")
    images.add_argument("--engine-image", required=True, help="image of the engines")
    images.add_argument("--router-image", required=True, help="image of the routers")
    images.add_argument("--image-pull-policy", choices=("Always", "IfNotPresent", "Never"), default="IfNotPresent")
    images.add_argument("--image-pull-secret", action="append", default=[], help="name of a Secret; may be repeated")
    metrics = parser.add_argument_group("metrics")
    metrics.add_argument("--prometheus-url", default="", help="base URL of Prometheus; without it no machine is moved")
    metrics.add_argument("--prometheus-token-file", type=Path, help="file with the bearer token, read for each query")
    metrics.add_argument("--prometheus-ca-file", type=Path, help="authority of the server's certificate")
    metrics.add_argument("--prometheus-insecure-skip-verify", action="store_true")
    metrics.add_argument("--prometheus-timeout-seconds", type=float, default=10.0)
    lease = parser.add_argument_group("lease")
    lease.add_argument("--lease-namespace", default="", help="default: the namespace this runs in")
    lease.add_argument("--lease-name", default="poolwright-operator")
    lease.add_argument("--lease-duration-seconds", type=int, default=15)
    parser.add_argument("--probe-host", default="0.0.0.0")
    parser.add_argument("--probe-port", type=int, default=8080, help="/healthz, /readyz and /metrics")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info")
    parser.add_argument("--kubeconfig", help="default: the pod's own account, else KUBECONFIG or the usual file")
    parser.add_argument("--context", help="context of the kubeconfig")
    return parser
