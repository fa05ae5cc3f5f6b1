"""Errors of the router's own, in OpenAI's shape, as engines write theirs."""

import json
from http import HTTPStatus


class RequestError(Exception):
    """The client's request cannot be served; the answer says why. `counted`: metrics do, so no log need."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        retry_after_seconds: int | None = None,
        counted: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.counted = counted
        self.retry_after_seconds = retry_after_seconds
        self.body = error_body(status, message, kind, param)


def error_body(status: int, message: str, kind: str | None = None, param: str | None = None) -> bytes:
    kind = kind or HTTPStatus(status).phrase.replace(" ", "") + "Error"
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}}).encode()
