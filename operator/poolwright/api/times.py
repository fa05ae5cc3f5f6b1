"""Times as the resource and Kubernetes write them: RFC 3339 in UTC, from and to Unix seconds."""

from datetime import UTC, datetime


def format_time(unix_seconds: float, *, fraction: bool = True) -> str:
    """With microseconds, as the API writes a MicroTime; without, as it writes a Time."""
    moment = datetime.fromtimestamp(unix_seconds, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if fraction else "%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> float:
    """Unix seconds. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"not a time with a zone: {text!r}")
    return moment.timestamp()
