"""The operator's command line and environment, checked once, as one frozen value."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from poolwright import arguments
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


def parse(words: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> Options:
    """Exits with status 2 and one line that names every setting that is missing or wrong."""
    parser = _parser()
    given = parser.parse_args(words)
    root_secret = environment.get(names.ENV_ROOT_SECRET, "").strip().encode()
    if problems := list(_problems(given, root_secret, environment)):
        parser.error("; ".join(problems))
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


def _problems(given: argparse.Namespace, root_secret: bytes, environment: Mapping[str, str]) -> Iterator[str]:
    if bool(given.namespace) == given.all_namespaces:
        yield "give either --namespace, once or more, or --all-namespaces"
    for option, value in (("--engine-image", given.engine_image), ("--router-image", given.router_image)):
        if not value:
            yield f"{option} is missing"
    if not root_secret:
        yield f"the environment lacks {names.ENV_ROOT_SECRET}"
    elif len(root_secret) < 16:
        yield f"{names.ENV_ROOT_SECRET} must hold at least 16 bytes"
    if given.lease_duration_seconds < 3:
        yield "--lease-duration-seconds must be at least 3"
    if given.kubeconfig is not None:
        if problem := _kubeconfig_problem(Path(given.kubeconfig)):
            yield f"--kubeconfig: {problem}"
    elif files := [file for file in environment.get("KUBECONFIG", "").split(os.pathsep) if file]:
        # Of several, some may be absent; a pod has its own account beside.
        problems = [_kubeconfig_problem(Path(file).expanduser()) for file in files]
        if all(problems) and "KUBERNETES_SERVICE_HOST" not in environment:
            yield f"KUBECONFIG: {problems[0]}"


def _kubeconfig_problem(file: Path) -> str | None:
    if problem := arguments.unreadable(file):
        return problem
    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        content = None
    return None if isinstance(content, dict) else f"{file} is no kubeconfig"


def own_namespace() -> str | None:
    """The namespace of the pod this runs in."""
    try:
        return _NAMESPACE_FILE.read_text().strip() or None
    except OSError:
        return None


def _parser() -> argparse.ArgumentParser:
    parser = arguments.Parser(
        prog="poolwright operator",
        description="Keep InferencePools: their children, their roles, their moves and their status.",
        epilog=f"The environment gives {names.ENV_ROOT_SECRET}, from which the key of every pool is derived.",
    )
    scope = parser.add_argument_group("scope")
    scope.add_argument(
        "--namespace", action="append", default=[], help="serve this namespace; may be repeated (default: none)"
    )
    scope.add_argument("--all-namespaces", action="store_true", help="serve the whole cluster (default: no)")
    images = parser.add_argument_group("images")
    images.add_argument("--engine-image", help="image of the engines; required")
    images.add_argument("--router-image", help="image of the routers; required")
    images.add_argument(
        "--image-pull-policy",
        choices=("Always", "IfNotPresent", "Never"),
        default="IfNotPresent",
        help="of both images (default: %(default)s)",
    )
    images.add_argument(
        "--image-pull-secret", action="append", default=[], help="name of a Secret; may be repeated (default: none)"
    )
    metrics = parser.add_argument_group("metrics")
    metrics.add_argument(
        "--prometheus-url", default="", help="base URL of Prometheus (default: none, and then no machine is moved)"
    )
    metrics.add_argument(
        "--prometheus-token-file", type=Path, help="file with the bearer token, read for each query (default: none)"
    )
    metrics.add_argument(
        "--prometheus-ca-file", type=Path, help="authority of the server's certificate (default: the system's)"
    )
    metrics.add_argument(
        "--prometheus-insecure-skip-verify",
        action="store_true",
        help="do not check the server's certificate (default: check it)",
    )
    metrics.add_argument(
        "--prometheus-timeout-seconds",
        type=arguments.seconds,
        metavar="SECONDS",
        default=10.0,
        help="of one query (default: %(default)s)",
    )
    lease = parser.add_argument_group("lease")
    lease.add_argument("--lease-namespace", default="", help="default: the namespace this runs in")
    lease.add_argument("--lease-name", default="poolwright-operator", help="name of the Lease (default: %(default)s)")
    lease.add_argument(
        "--lease-duration-seconds",
        type=arguments.count,
        metavar="SECONDS",
        default=15,
        help="how long another operator waits for this one; at least 3 (default: %(default)s)",
    )
    parser.add_argument("--probe-host", default="0.0.0.0", help="address of the probes (default: %(default)s, all)")
    parser.add_argument(
        "--probe-port",
        type=arguments.port,
        default=8080,
        help="port of /healthz, /readyz and /metrics; 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="default: %(default)s")
    parser.add_argument("--kubeconfig", help="default: the pod's own account, else KUBECONFIG or the usual file")
    parser.add_argument("--context", help="context of the kubeconfig (default: its current one)")
    return parser
