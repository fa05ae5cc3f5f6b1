"""What `/metrics` says: vLLM's names and buckets for what vLLM measures too, `poolwright_engine_*` for the rest.

Owns a registry of its own and the names in it. Every series exists at 0 from the start: one that is born at 20 has
rate 0. What the engine knows better than a counter (queues, memory, role) is read from it at each scrape.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from poolwright_engine.loop.engine import EngineStats
from poolwright_engine.loop.observer import Observer
from poolwright_engine.scheduling.sequence import FinishReason
from poolwright_protocol import names
from poolwright_protocol.roles import Role, RoleState

ROLE = "poolwright_engine_role"
ROLE_EPOCH = "poolwright_engine_role_epoch"
FOREIGN_REQUESTS = "poolwright_engine_foreign_requests"
WAITING_PROMPT_TOKENS = "poolwright_engine_waiting_prompt_tokens"
OLDEST_WAITING = "poolwright_engine_oldest_waiting_seconds"
KV_FREE_BLOCKS = "poolwright_engine_kv_free_blocks"
KV_TOTAL_BLOCKS = "poolwright_engine_kv_total_blocks"

_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_GAP_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, … up to `limit`: vLLM's buckets for token counts."""
    bounds: list[float] = []
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > limit:
                return tuple(bounds)
            bounds.append(digit * scale)
        scale *= 10


REFUSALS = ("too_long", "invalid", "queue_full", "draining", "dead")
# Made before the model is loaded: token buckets reach the longest model this may turn out to be.
_MOST_TOKENS = 131072


class EngineMetrics(Observer):
    """Series of one engine. `attach` connects the running engine; until then the scrape-time series read as 0.

    The reason a request ended is counted by who answers the client (`finished_as`): to the loop a stop string is an
    abort. All else is as the loop and the hand-off report it.
    """

    def __init__(
        self,
        model_name: str,
        pool: str,
        pool_namespace: str,
        machine_uid: str,
        kv_failure_reasons: Sequence[str] = (),
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._model = {"model_name": model_name, "engine": "0"}
        self._machine = {
            names.METRIC_POOL: pool,
            names.METRIC_POOL_NAMESPACE: pool_namespace,
            names.METRIC_MACHINE_UID: machine_uid,
        }
        counts = one_two_five(_MOST_TOKENS)

        self._first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", _FIRST_TOKEN_SECONDS
        )
        self._token_gap_seconds = self._histogram(
            "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _TOKEN_GAP_SECONDS
        )
        self._seconds_per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            _TOKEN_GAP_SECONDS,
        )
        self._request_seconds = self._histogram(
            "e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _REQUEST_SECONDS
        )
        self._queue_seconds = self._histogram(
            "request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", _REQUEST_SECONDS
        )
        self._inference_seconds = self._histogram(
            "request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", _REQUEST_SECONDS
        )
        self._prefill_seconds = self._histogram(
            "request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", _REQUEST_SECONDS
        )
        self._decode_seconds = self._histogram(
            "request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", _REQUEST_SECONDS
        )
        self._request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Number of prefill tokens processed.", counts
        )
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Number of generation tokens processed.", counts
        )
        self._request_max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.", counts
        )
        self._request_prefill_computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
            counts,
        )
        self._request_choices = self._histogram("request_params_n", "Histogram of the n request parameter.", _CHOICES)
        self._request_max_tokens = self._histogram(
            "request_params_max_tokens", "Histogram of the max_tokens request parameter.", counts
        )
        self._request_preemptions = self._histogram(
            "request_num_preemptions", "Histogram of the number of times a request was preempted.", _PREEMPTIONS
        )
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Histogram of number of tokens per engine_step.", _STEP_TOKENS
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Number of prefill tokens processed.")
        self._cached_prompt_tokens = self._counter(
            "prompt_tokens_cached", "Number of cached prompt tokens (local + external)."
        )
        self._prompt_tokens_by_source = self._counters(
            "prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            "source",
            ("local_compute", "local_cache_hit", "external_kv_transfer"),
        )
        self._generation_tokens = self._counter("generation_tokens", "Number of generation tokens processed.")
        self._requests = self._counters(
            "request_success",
            "Count of successfully processed requests.",
            "finished_reason",
            (*(reason.value for reason in FinishReason), "repetition"),
        )
        self._admission_rejections = self._counters(
            "admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            "reason",
            ("max_num_queued_reqs", "max_num_queued_tokens"),
            {"model_name": model_name},  # vLLM counts it where requests come in, in front of its engines
        )
        self._preemptions = self._counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens."
        )
        self._prefix_hits = self._counter(
            "prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens."
        )

        self._steps = self._own_counter("poolwright_engine_steps", "Steps run.")
        self._busy_seconds = self._own_counter("poolwright_engine_busy_seconds", "Time the device worked on steps.")
        self._computed_prompt_tokens = self._own_counter(
            "poolwright_engine_computed_prompt_tokens", "Prompt tokens computed here, for peers too."
        )
        self._preemptions_by_way = self._own_counter(
            "poolwright_engine_preemptions", "Requests that lost their memory to another.", "way", ("recompute", "swap")
        )
        self._swapped_blocks = self._own_counter(
            "poolwright_engine_swapped_blocks", "KV blocks copied to host memory and back.", "direction", ("out", "in")
        )
        self._padding_tokens = self._own_counter(
            "poolwright_engine_padding_tokens", "Tokens that padded batches would have computed beside the useful ones."
        )
        self._prefills_served = self._own_counter(
            "poolwright_engine_prefills_served", "Prompts computed here for another machine."
        )
        self._kv_transfers = self._own_counter(
            "poolwright_engine_kv_transfers", "KV hand-offs completed.", "side", ("send", "receive")
        )
        self._kv_bytes = self._own_counter(
            "poolwright_engine_kv_transfer_bytes", "Bytes of KV handed off.", "side", ("send", "receive")
        )
        self._kv_seconds = self._own_counter(
            "poolwright_engine_kv_transfer_seconds", "Time of completed KV hand-offs.", "side", ("send", "receive")
        )
        self._kv_failures = {
            side: self._own_counter(
                f"poolwright_engine_kv_{side}_failures",
                f"KV hand-offs that failed at {side}; the request was recomputed.",
                "reason",
                kv_failure_reasons,
            )
            for side in ("send", "receive")
        }
        self._refusals = self._own_counter(
            "poolwright_engine_refused_requests", "Requests the engine did not take.", "reason", REFUSALS
        )

        self._scrape = _Scrape(self._model, self._machine)
        self.registry.register(self._scrape)

    def attach(
        self,
        stats: Callable[[], EngineStats],
        role_state: Callable[[], RoleState],
        cache_config: Mapping[str, str],
    ) -> None:
        self._scrape.stats, self._scrape.role_state, self._scrape.cache_config = stats, role_state, cache_config

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def finished_as(self, reason: FinishReason) -> None:
        self._requests[reason.value].inc()

    def request_scheduled(self, queue_seconds: float) -> None:
        self._queue_seconds.observe(queue_seconds)

    def first_token(self, ttft_seconds: float, prefill_seconds: float) -> None:
        self._first_token_seconds.observe(ttft_seconds)
        self._prefill_seconds.observe(prefill_seconds)

    def inter_token(self, seconds: float) -> None:
        self._token_gap_seconds.observe(seconds)

    def step(self, num_tokens: int, num_prefill_tokens: int, busy_seconds: float) -> None:
        role = self._role
        self._step_tokens.observe(num_tokens)
        self._steps[role][""].inc()
        self._busy_seconds[role][""].inc(busy_seconds)
        self._computed_prompt_tokens[role][""].inc(num_prefill_tokens)

    def prompt_tokens(self, count: int, transferred: bool, cached: int = 0) -> None:
        cached = count if transferred else cached
        self._prompt_tokens.inc(count)
        self._prompt_tokens_by_source["local_compute"].inc(count - cached)
        self._prompt_tokens_by_source["external_kv_transfer" if transferred else "local_cache_hit"].inc(cached)
        self._cached_prompt_tokens.inc(cached)
        self._request_prefill_computed_tokens.observe(count - cached)

    def prefix_lookup(self, queried_tokens: int, hit_tokens: int) -> None:
        self._prefix_queries.inc(queried_tokens)
        self._prefix_hits.inc(hit_tokens)

    def preempted(self, swapped: bool) -> None:
        self._preemptions.inc()
        self._preemptions_by_way[self._role]["swap" if swapped else "recompute"].inc()

    def swapped(self, num_blocks: int, out: bool) -> None:
        self._swapped_blocks[self._role]["out" if out else "in"].inc(num_blocks)

    def padded(self, num_tokens: int) -> None:
        self._padding_tokens[self._role][""].inc(num_tokens)

    def request_preemptions(self, count: int) -> None:
        self._request_preemptions.observe(count)

    def answered(self, choices: int, most_generation_tokens: int) -> None:
        """All choices of one prompt ended; the longest had so many tokens. By who answers the client, since to the loop
        each is a request of its own."""
        self._request_choices.observe(choices)
        self._request_max_generation_tokens.observe(most_generation_tokens)

    def generation_tokens(self, count: int) -> None:
        self._generation_tokens.inc(count)

    def finished(
        self,
        reason: FinishReason,
        prompt_tokens: int,
        generation_tokens: int,
        max_tokens: int,
        e2e_seconds: float,
        inference_seconds: float,
        decode_seconds: float,
    ) -> None:
        """Of a request that ended before its first token only what it asked for is observed."""
        self._request_max_tokens.observe(max_tokens)
        if not generation_tokens:
            return
        self._request_seconds.observe(e2e_seconds)
        self._inference_seconds.observe(inference_seconds)
        self._decode_seconds.observe(decode_seconds)
        self._request_prompt_tokens.observe(prompt_tokens)
        self._request_generation_tokens.observe(generation_tokens)
        self._seconds_per_token.observe(decode_seconds / (generation_tokens - 1) if generation_tokens > 1 else 0.0)

    def refused(self, reason: str) -> None:
        self._refusals[self._role][reason].inc()
        if reason == "queue_full":
            self._admission_rejections["max_num_queued_reqs"].inc()

    def prefill_served(self, prompt_tokens: int) -> None:
        self._prefills_served[self._role][""].inc()

    def kv_sent(self, num_bytes: int, seconds: float) -> None:
        self._transferred("send", num_bytes, seconds)

    def kv_received(self, num_bytes: int, seconds: float) -> None:
        self._transferred("receive", num_bytes, seconds)

    def kv_failed(self, side: str, reason: str) -> None:
        self._kv_failures[side][self._role][reason].inc()

    def _transferred(self, side: str, num_bytes: int, seconds: float) -> None:
        role = self._role
        self._kv_transfers[role][side].inc()
        self._kv_bytes[role][side].inc(num_bytes)
        self._kv_seconds[role][side].inc(seconds)

    @property
    def _role(self) -> Role:
        """The role that an event now is counted under."""
        return self._scrape.role

    def _own_counter(
        self, name: str, text: str, label: str | None = None, values: Sequence[str] = ("",)
    ) -> dict[Role, dict[str, Counter]]:
        """By role, then by the value of `label` ("" where there is none): all there from the start."""
        labels = [*self._machine, names.METRIC_ROLE, *([label] if label else [])]
        metric = Counter(name, text, labels, registry=self.registry)
        return {
            role: {
                value: metric.labels(*self._machine.values(), role.value, *([value] if label else []))
                for value in values
            }
            for role in Role
        }

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, list(self._model), buckets=tuple(buckets), registry=self.registry)
        return metric.labels(**self._model)

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(f"vllm:{name}", text, list(self._model), registry=self.registry)
        return metric.labels(**self._model)

    def _counters(
        self, name: str, text: str, label: str, values: Iterable[str], labels: Mapping[str, str] | None = None
    ) -> dict[str, Counter]:
        """One counter per value, all there from the start. `labels`: in place of model and engine."""
        labels = self._model if labels is None else labels
        metric = Counter(f"vllm:{name}", text, [*labels, label], registry=self.registry)
        return {value: metric.labels(**labels, **{label: value}) for value in values}


class _Scrape(Collector):
    """The series that are read rather than counted."""

    def __init__(self, model: Mapping[str, str], machine: Mapping[str, str]) -> None:
        self._model = model
        self._machine = machine
        self.stats: Callable[[], EngineStats] | None = None
        self.role_state: Callable[[], RoleState] | None = None
        self.cache_config: Mapping[str, str] = {}

    @property
    def role(self) -> Role:
        return self.role_state().role if self.role_state else Role.MIXED

    def collect(self) -> Iterator[Metric]:
        stats = self.stats() if self.stats else EngineStats(0, 0, 0.0, 0, 0, 0, 0.0)
        yield self._vllm("num_requests_running", "Number of requests in model execution batches.", stats.running)
        yield self._vllm("num_requests_waiting", "Number of requests waiting to be processed.", stats.waiting)
        yield self._vllm("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", stats.kv_usage)
        yield self._vllm_by(
            "num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            "reason",
            {"capacity": stats.waiting - stats.deferred, "deferred": stats.deferred},
        )
        yield self._vllm_by(
            "engine_sleep_state",
            "Engine sleep state; awake = 1 means the engine is awake. This engine never sleeps.",
            "sleep_state",
            {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
        )
        labels = {"engine": self._model["engine"], **self.cache_config}  # as vLLM's, which names no model here
        info = GaugeMetricFamily("vllm:cache_config_info", "Information of the cache's shape.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info

        state = self.role_state() if self.role_state else None
        role = state.role if state else Role.MIXED
        one_hot = GaugeMetricFamily(
            ROLE, "1 for the role this machine acts in, 0 for the others.", labels=[*self._machine, names.METRIC_ROLE]
        )
        for each in Role:
            one_hot.add_metric([*self._machine.values(), each.value], float(each is role))
        yield one_hot
        for name, text, value in (
            (ROLE_EPOCH, "Epoch of the role.", state.epoch if state else 0),
            (FOREIGN_REQUESTS, "Requests begun under an earlier role.", state.foreign_requests if state else 0),
            (WAITING_PROMPT_TOKENS, "Prompt tokens of requests not yet scheduled.", stats.waiting_prompt_tokens),
            (OLDEST_WAITING, "Age of the oldest request not yet scheduled.", stats.oldest_waiting_seconds),
            (KV_FREE_BLOCKS, "KV blocks free to allocate.", stats.kv_free_blocks),
            (KV_TOTAL_BLOCKS, "KV blocks, the null block excluded.", stats.kv_total_blocks),
        ):
            family = GaugeMetricFamily(name, text, labels=[*self._machine, names.METRIC_ROLE])
            family.add_metric([*self._machine.values(), role.value], float(value))
            yield family

    def _vllm(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._model))
        family.add_metric(list(self._model.values()), value)
        return family

    def _vllm_by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=[*self._model, label])
        for key, value in values.items():
            family.add_metric([*self._model.values(), key], value)
        return family
