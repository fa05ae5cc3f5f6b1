"""Reads out of pods and Deployments why machines do not come up, in words that stay the same while the cause does.

Pure. Equal causes are one line with a count, and nothing that changes by itself (a back-off's seconds, an attempt's
number) is repeated, so that a condition made of it is written once.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from poolwright.kube.client import Manifest
from poolwright_protocol import names

_MESSAGE_CHARACTERS = 300
# Reasons a container waits that do not pass by themselves.
_STUCK = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImagePull",
    "ErrImageNeverPull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
}
NOT_SCHEDULED = "not scheduled: "
# The pull fails, then waits, then fails: one state for a reader.
_SAME_REASON = {"ErrImagePull": "ImagePullBackOff"}


@dataclass(frozen=True, slots=True)
class Troubles:
    problems: Sequence[str] = ()
    secret_missing: bool = False


def troubles(pods: Iterable[Manifest], deployments: Iterable[Manifest]) -> Troubles:
    counts: dict[tuple[str, str], int] = {}
    secret_missing = False
    for pod in pods:
        component = (pod["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT, "")
        if "deletionTimestamp" in pod["metadata"] or pod_is_ready(pod):
            continue
        for text in dict.fromkeys(_pod_troubles(pod)):
            counts[component, text] = counts.get((component, text), 0) + 1
            secret_missing = secret_missing or ("CreateContainerConfigError" in text and "secret" in text)
    problems = [
        f"{count} {component} {'pod' if count == 1 else 'pods'}: {text}"
        for (component, text), count in sorted(counts.items())
    ]
    for deployment in deployments:
        for condition in (deployment.get("status") or {}).get("conditions") or ():
            if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
                name = deployment["metadata"]["name"]
                problems.append(f"Deployment {name} cannot make pods: {_short(condition.get('message', ''))}")
    return Troubles(tuple(problems), secret_missing)


def pod_is_ready(pod: Manifest) -> bool:
    """Ready and not on its way out."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return "deletionTimestamp" not in pod["metadata"] and any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


def _pod_troubles(pod: Manifest) -> Iterator[str]:
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            yield f"{NOT_SCHEDULED}{_short(condition.get('message', ''))}"
    for container in status.get("containerStatuses") or ():
        state, last = container.get("state") or {}, container.get("lastState") or {}
        waiting = state.get("waiting") or {}
        ended = state.get("terminated") or last.get("terminated")
        if waiting.get("reason") in _STUCK:
            reason = _SAME_REASON.get(waiting["reason"], waiting["reason"])
            message = waiting.get("message", "")
            yield f"{reason} {container['image']}" if reason == "ImagePullBackOff" else f"{reason}: {_short(message)}"
        elif ended and ended.get("exitCode", 0) != 0:
            message = _short(ended.get("message", "")) or ended.get("reason", "")
            yield f"container {container['name']} ended with code {ended['exitCode']}: {message}"


def _short(text: str) -> str:
    """The last line that says something, where a traceback or a log precedes it."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return last if len(last) <= _MESSAGE_CHARACTERS else last[: _MESSAGE_CHARACTERS - 1] + "…"
