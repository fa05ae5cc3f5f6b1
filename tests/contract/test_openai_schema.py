"""Whatever the schema allows, and much that it does not, gets an answer that the schema knows: never a failure."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CheckFunction
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from poolwright_engine.checkpoint.loader import LoadedModel
from support.api_server import MODEL, ApiServer, serving_model, tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPERATIONS = [
    ("POST", "/v1/completions", 30),
    ("POST", "/v1/chat/completions", 30),
    ("POST", "/tokenize", 15),
    ("POST", "/detokenize", 15),
    ("GET", "/v1/models", 3),
    ("GET", "/v1/models/{model_id}", 15),
    ("GET", "/health", 3),
    ("GET", "/ready", 3),
    ("GET", "/ping", 3),
    ("POST", "/ping", 3),
    ("GET", "/version", 3),
    ("GET", "/load", 3),
    ("GET", "/metrics", 3),
]
CHECKS: list[CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(model: LoadedModel) -> AsyncIterator[ApiServer]:
    async with serving_model(model) as server:
        yield server
        await server.until_idle()


async def test_the_schema_names_every_operation(api: ApiServer) -> None:
    async with httpx.AsyncClient(base_url=api.url) as http:
        paths: dict[str, Any] = (await http.get("/openapi.json")).json()["paths"]
    found = {(method.upper(), path) for path, operations in paths.items() for method in operations}
    assert found == {(method, path) for method, path, _ in OPERATIONS}


@pytest.mark.parametrize(("method", "path", "examples"), OPERATIONS)
@pytest.mark.parametrize("mode", list(GenerationMode))
async def test_no_request_is_a_failure_of_the_server(
    api: ApiServer, method: str, path: str, examples: int, mode: GenerationMode
) -> None:
    def explore() -> None:
        schema = schemathesis.openapi.from_url(f"{api.url}/openapi.json")
        operation = schema[path][method]
        if mode is GenerationMode.NEGATIVE and not operation.body:
            return  # there is nothing to get wrong: any path is text

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE and "model" in case.body:
                case.body["model"] = MODEL  # any other is refused for its name alone
            case.call_and_validate(checks=CHECKS, timeout=20)

        check()

    await asyncio.to_thread(explore)
    await api.until_idle(limit_seconds=10)
