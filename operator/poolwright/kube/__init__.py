"""The only Kubernetes client of Poolwright: list, watch, apply, patch; and the machines of a pool as its pods.

It is built on the asynchronous official client: a watch or a request is cancelled like any other coroutine, and nothing
waits in a thread. It knows no policy and renders nothing.
"""

from poolwright.kube.client import ApiError, KubeClient
from poolwright.kube.machines import KubeMachines, Nodes
from poolwright.kube.resources import Resource

__all__ = ["ApiError", "KubeClient", "KubeMachines", "Nodes", "Resource"]
