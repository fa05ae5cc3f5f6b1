"""Refusals, as vLLM 0.32 words them: what a client reads, and with which status.

Knows no request and no HTTP server.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_MOST_LINES = 10
_MOST_CHARACTERS = 200


class ApiError(Exception):
    """A refusal with its HTTP status; `body` is what the client reads. `logged`: what the log says instead of a message
    that repeats what the client sent, which nobody else is to read."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        type: str | None = None,
        retry_after_seconds: int | None = None,
        logged: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.logged = message if logged is None else logged
        self.type = type or _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.status}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_seconds is None else {"retry-after": str(self.retry_after_seconds)}


def bad_parameter(message: str, parameter: str, value: object = None) -> ApiError:
    """400, with vLLM's trailing "(parameter=…, value=…)"."""
    shown = "" if value is None else f", value={brief(value)}"
    logged = f"{message} (parameter={parameter})"
    return ApiError(400, f"{message} (parameter={parameter}{shown})", parameter, logged=logged)


def bad_request(message: str, parameter: str) -> ApiError:
    """400, for what vLLM refuses without naming the parameter in its text."""
    return ApiError(400, message, parameter)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Of a body that is no valid request at all, without echoing what may be megabytes."""
    lines: list[dict[str, Any]] = [
        {**error, "loc": _place(error["loc"]), "input": brief(error.get("input"))} for error in errors[:_MOST_LINES]
    ]
    for line in lines:
        line.pop("url", None)
        if "ctx" in line:
            line["ctx"] = {key: str(value) for key, value in line["ctx"].items()}
    label = "validation error" if len(errors) == 1 else "validation errors"
    message = "\n".join([f"{len(errors)} {label}:", *(f"  {line}" for line in lines)])
    if len(errors) > _MOST_LINES:
        message += f"\n  ...and {len(errors) - _MOST_LINES} more {label}"
    logged = "; ".join(f"{line['loc']}: {line['type']}" for line in lines)
    return ApiError(400, message, lines[0]["loc"], type="Bad Request", logged=f"{len(errors)} {label}: {logged}")


def _place(parts: Sequence[object]) -> str:
    """Without the names of types that pydantic puts in for each branch of a union."""
    names = [str(part) for part in parts]
    known = [name for name in names if not any(c in name for c in "[](){}") and name not in _PYDANTICS_OWN]
    return ".".join(known or names)


_PYDANTICS_OWN = {"str", "int", "float", "bool", "dict", "list", "constrained-str", "constrained-int"}


def brief(value: object) -> object:
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 1000:
        return "<a very large integer>"
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
