"""`/metrics` has vLLM's names, labels and buckets, from the first scrape on, and counts each request once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from poolwright_engine.api.metrics import EngineMetrics
from poolwright_engine.checkpoint.loader import LoadedModel
from poolwright_engine.handoff.exchange import FailureReason
from poolwright_engine.loop.engine import EngineStats
from poolwright_engine.scheduling.sequence import FinishReason
from poolwright_protocol.roles import Role, RoleState
from support.api_server import ApiServer, serving_model, tiny_model, until
from support.scripted_runner import ScriptedRunner

VLLM = Path(__file__).parent / "vllm"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def api(model: LoadedModel) -> AsyncIterator[ApiServer]:
    async with serving_model(model) as server:
        yield server


@pytest.fixture
async def slow_api(model: LoadedModel) -> AsyncIterator[ApiServer]:
    async with serving_model(model, ScriptedRunner(num_blocks=65, block_size=16, step_seconds=0.02)) as server:
        yield server


@pytest.fixture
async def http(api: ApiServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=api.url, timeout=30) as client:
        yield client


async def test_every_series_exists_before_the_first_request(http: httpx.AsyncClient) -> None:
    text = (await http.get("/metrics")).text
    for line in text.splitlines():
        if not line.startswith("#") and "_bucket" not in line:
            name, value = line.rsplit(" ", 1)
            is_state = any(
                part in name for part in ("info", "awake", "blocks", "steps", "role{", "iteration", "_created")
            )
            assert float(value) == 0 or is_state, line


# What this engine has nothing to say about: media, caches others share, arithmetic per GPU, tiers of a prefix cache.
_ABSENT = ("vllm:mm_cache", "vllm:external_prefix_cache", "vllm:estimated_", "vllm:prompt_tokens_cached_by_source")


def vllm_families(text: str) -> dict[str, Metric]:
    """Those that vLLM has and this engine can have."""
    families = {f.name: f for f in text_string_to_metric_families(text) if f.name.startswith("vllm:")}
    return {name: f for name, f in families.items() if not (name.startswith(_ABSENT) or name.endswith("_created"))}


# Their buckets end where the model's context does, in the capture at 2,048.
_OF_TOKENS = {
    f"vllm:request_{what}"
    for what in ("prompt_tokens", "generation_tokens", "max_num_generation_tokens", "params_max_tokens",
                 "prefill_kv_computed_tokens")
}  # fmt: skip


def series(family: Metric) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Names and labels, a histogram's buckets among them, whatever the model is called."""
    return {
        (sample.name, tuple(sorted((sample.labels | {"model_name": "m"}).items())))
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def test_all_series_are_vllms(http: httpx.AsyncClient) -> None:
    """Every name, kind, label, value of a label and bucket of the capture, and under vLLM's prefix no others."""
    theirs = vllm_families((VLLM / "vllm_metrics.txt").read_text())
    ours = vllm_families((await http.get("/metrics")).text)
    assert len(theirs) > 30
    assert {name: family.type for name, family in ours.items()} == {n: family.type for n, family in theirs.items()}
    for name in theirs.keys() - {"vllm:cache_config_info"}:
        more = series(ours[name]) ^ series(theirs[name])
        if name in _OF_TOKENS:
            more = {(sample, labels) for sample, labels in more if not float(dict(labels).get("le", 0)) > 2048}
        assert not more, name


async def test_the_description_of_the_cache_has_vllms_labels(http: httpx.AsyncClient) -> None:
    """Those that mean something here: the rest of vLLM's describes caches of other kinds."""
    (theirs,) = vllm_families((VLLM / "vllm_metrics.txt").read_text())["vllm:cache_config_info"].samples
    (ours,) = vllm_families((await http.get("/metrics")).text)["vllm:cache_config_info"].samples
    assert {"engine", "block_size"} <= ours.labels.keys() <= theirs.labels.keys()
    assert ours.value == theirs.value == 1


async def test_a_request_is_counted_once_for_what_it_was(http: httpx.AsyncClient, api: ApiServer) -> None:
    await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "ignore_eos": True})
    await api.until_idle()
    assert api.sample("vllm:request_success_total", finished_reason="length") == 1
    assert api.sample("vllm:prompt_tokens_total") == 3
    assert api.sample("vllm:prompt_tokens_by_source_total", source="local_compute") == 3
    assert api.sample("vllm:generation_tokens_total") == 5
    assert api.sample("vllm:time_to_first_token_seconds_count") == 1
    assert api.sample("vllm:inter_token_latency_seconds_count") == 4
    assert api.sample("vllm:e2e_request_latency_seconds_count") == 1
    assert api.sample("vllm:request_generation_tokens_sum") == 5
    assert api.sample("vllm:request_params_max_tokens_sum") == 5
    assert api.sample("vllm:request_params_n_sum") == 1
    assert api.sample("vllm:request_max_num_generation_tokens_sum") == 5
    assert api.sample("vllm:request_num_preemptions_count") == 1


async def test_choices_are_requests_of_their_own_but_one_in_what_was_asked(
    http: httpx.AsyncClient, api: ApiServer
) -> None:
    asked = {"prompt": ["abc", "de"], "n": 3, "max_tokens": 5, "ignore_eos": True}
    await http.post("/v1/completions", json=asked)
    await api.until_idle()
    assert api.sample("vllm:request_success_total", finished_reason="length") == 6
    assert api.sample("vllm:request_params_n_count") == 2
    assert api.sample("vllm:request_params_n_sum") == 6
    assert api.sample("vllm:request_max_num_generation_tokens_sum") == 10


async def test_tokens_found_in_the_cache_are_counted_apart(http: httpx.AsyncClient, api: ApiServer) -> None:
    asked = {"prompt": "x" * 40, "max_tokens": 2, "ignore_eos": True}
    for _ in range(2):
        await http.post("/v1/completions", json=asked)
        await api.until_idle()
    assert api.sample("vllm:prefix_cache_queries_total") == 80
    assert api.sample("vllm:prefix_cache_hits_total") == 32
    assert api.sample("vllm:prompt_tokens_total") == 80
    assert api.sample("vllm:prompt_tokens_cached_total") == 32
    assert api.sample("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 32
    assert api.sample("vllm:prompt_tokens_by_source_total", source="local_compute") == 48
    assert api.sample("vllm:request_prefill_kv_computed_tokens_sum") == 48


def test_preemptions_are_counted_by_what_became_of_the_memory() -> None:
    metrics = EngineMetrics("m", "chat", "default", "uid-1")
    metrics.preempted(swapped=True)
    metrics.preempted(swapped=False)
    metrics.swapped(5, out=True)
    metrics.padded(7)
    metrics.request_preemptions(2)
    vllm = {"model_name": "m", "engine": "0"}
    value = metrics.registry.get_sample_value
    assert value("vllm:num_preemptions_total", vllm) == 2
    assert value("vllm:request_num_preemptions_sum", vllm) == 2
    ours = {"inference_pool": "chat", "inference_pool_namespace": "default", "machine_uid": "uid-1", "role": "mixed"}
    assert value("poolwright_engine_preemptions_total", ours | {"way": "swap"}) == 1
    assert value("poolwright_engine_preemptions_total", ours | {"way": "recompute"}) == 1
    assert value("poolwright_engine_swapped_blocks_total", ours | {"direction": "out"}) == 5
    assert value("poolwright_engine_padding_tokens_total", ours) == 7


async def test_a_stop_string_is_a_success_not_an_abort(http: httpx.AsyncClient, api: ApiServer) -> None:
    asked: dict[str, Any] = {"prompt": "abc", "max_tokens": 30, "temperature": 1, "seed": 5}
    text = (await http.post("/v1/completions", json=asked)).json()["choices"][0]["text"]
    await http.post("/v1/completions", json={**asked, "stop": text[3]})
    assert api.ended_as(FinishReason.STOP) == 1
    assert api.ended_as(FinishReason.ABORT) == 0


async def test_requests_that_never_ran_have_no_latencies(slow_api: ApiServer) -> None:
    """A sum that grows by the machine's uptime is what unset time stamps make of it."""
    async with httpx.AsyncClient(base_url=slow_api.url, timeout=10) as http:
        assert (await http.post("/v1/completions", json={"prompt": "x", "temperature": -1})).status_code == 400
        task = asyncio.create_task(http.post("/v1/completions", json={"prompt": ["x"] * 40, "max_tokens": 100}))
        await until(lambda: slow_api.engine.stats().waiting >= 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await slow_api.until_idle()
        text = (await http.get("/metrics")).text
    counts = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("vllm:")
    }
    assert slow_api.ended_as(FinishReason.ABORT) == 40
    assert counts["vllm:e2e_request_latency_seconds_count"] <= 16
    for name in ("e2e_request_latency", "request_queue_time", "request_decode_time", "time_to_first_token"):
        assert 0 <= counts[f"vllm:{name}_seconds_sum"] < 60


def test_hand_offs_are_counted_under_the_role_of_their_time() -> None:
    metrics = EngineMetrics("m", "chat", "default", "uid-1", [reason.value for reason in FailureReason])
    role = Role.PROMPT
    metrics.attach(
        lambda: EngineStats(2, 1, 0.25, 30, 40, 100, 1.5), lambda: RoleState("uid-1", "boot", role, 5, 1, 3), {}
    )
    metrics.prefill_served(10)
    metrics.kv_sent(1000, 0.5)
    role = Role.TOKEN
    metrics.kv_received(500, 0.25)
    metrics.kv_failed("receive", "corrupt")

    def value(name: str, role: str, **more: str) -> float | None:
        labels = {"inference_pool": "chat", "inference_pool_namespace": "default", "machine_uid": "uid-1"}
        return metrics.registry.get_sample_value(f"poolwright_engine_{name}", {**labels, "role": role, **more})

    assert value("prefills_served_total", "prompt") == 1
    assert value("prefills_served_total", "token") == 0
    assert value("kv_transfers_total", "prompt", side="send") == 1
    assert value("kv_transfer_bytes_total", "prompt", side="send") == 1000
    assert value("kv_transfers_total", "token", side="receive") == 1
    assert value("kv_transfer_seconds_total", "token", side="receive") == 0.25
    assert value("kv_receive_failures_total", "token", reason="corrupt") == 1
    assert value("kv_send_failures_total", "mixed", reason="no_grant") == 0
    assert [value("role", role.value) for role in Role] == [0, 1, 0]
    assert value("role_epoch", "token") == 5
    assert value("foreign_requests", "token") == 3
    assert value("oldest_waiting_seconds", "token") == 1.5
