"""`LLM`: a model in this process, for programs that have all their prompts at hand.

    from poolwright_engine import LLM, SamplingParams

    with LLM("HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
        for answer in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(answer.outputs[0].text)

Names and shapes are vLLM's. Throughput comes first: prompts are computed whole. The engine runs on threads of its own,
so the caller needs no event loop, and may have one.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ValidationError

from poolwright_engine.api.api_error import ApiError
from poolwright_engine.api.fan_out import Collected, Tally, best, choices_of, collected
from poolwright_engine.api.openai_api import ChatCompletionRequest, CompletionRequest, check_supported
from poolwright_engine.api.prompts import Prompt, Prompts
from poolwright_engine.api.sampling_options import sampling_params
from poolwright_engine.offline.throughput import Throughput
from poolwright_engine.process import assembly
from poolwright_engine.process.options import from_keywords
from poolwright_engine.process.progress import Bar, request_bar
from poolwright_engine.scheduling import sequence
from poolwright_engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_CANCEL_SECONDS = 10.0  # for the step that runs
_ANY_VOCABULARY = 2**31  # whether an id is of the model's own is seen when it is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """As the fields of a request to /v1/completions, and checked as those are, at once: raises ValueError for what no
    model could be asked. `max_tokens` None: up to the context's end, as in vLLM. `structured_outputs`: {"json": …},
    {"regex": …}, {"choice": […]} or {"grammar": …}."""

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        try:
            request = _request("x", self)
            sampling_params(request, _ANY_VOCABULARY)
            _ = request.choices, request.tries, request.stops
        except ApiError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int | None
    decoded_token: str


LogprobsOfToken = dict[int, Logprob]
"""By token id; the sampled token first."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[LogprobsOfToken] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    request_id: str
    prompt: str
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsOfToken | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


class _OfflineRequest(CompletionRequest):
    default_max_tokens: ClassVar[int | None] = None


@dataclass(frozen=True, slots=True)
class _Asked:
    prompt: Prompt
    request: CompletionRequest


@dataclass(slots=True)
class _Run:
    """One call: what it came to so far, shown as it goes."""

    bar: Bar
    began: float = field(default_factory=time.monotonic)
    counted: Throughput = field(default_factory=Throughput)

    def add(self, tally: Tally) -> None:
        self.counted.add(tally.prompt_tokens, sum(tally.completion_tokens))
        self.bar.advance(1, self.counted.rates(time.monotonic() - self.began))


class LLM:
    """`options` are the flags of `poolwright-engine serve` with underscores, such as `max_model_len=2048` or
    `enable_prefix_caching=False`. Raises ValueError with one line where they or the model cannot be used.

    `close` ends it; a `with` block does. An interrupted call (Ctrl-C) aborts its requests, and the engine goes on."""

    def __init__(self, model: str, **options: Any) -> None:
        config, warnings = from_keywords(str(model), options)
        for warning in warnings:
            log.warning(warning)
        self._thread = _EventLoopThread()
        self._running = self._thread.enter(assembly.running(config))
        parts = self._running.parts
        self._prompts = Prompts(parts.tokenizer, parts.vocab_size, parts.max_model_len, parts.max_chars_per_token)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """One answer for each prompt, a text or token ids, in their order; `sampling_params` for all, or one for each.
        Raises ValueError for what cannot be asked, before anything is generated; RuntimeError if the engine fails."""
        each = _as_list(prompts)
        params = self._params_of_each(sampling_params, len(each))

        async def ask() -> list[_Asked]:
            asked = []
            for prompt, one in zip(each, params, strict=True):
                request = _request(prompt, one)
                asked.append(_Asked((await self._prompts.of_completion(request))[0], request))
            return asked

        return self._answer(ask, progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Of one conversation or several. `template`: further fields of /v1/chat/completions about the prompt, such as
        `tools`, `add_generation_prompt` or `chat_template_kwargs`. Raises as `generate`."""
        each: Any = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        params = self._params_of_each(sampling_params, len(each))

        async def ask() -> list[_Asked]:
            asked = []
            for conversation, one in zip(each, params, strict=True):
                shown = _checked(ChatCompletionRequest, {**template, "messages": list(conversation)})
                check_supported(shown)
                prompt = await self._prompts.of_chat(shown, shown)
                request = _request(list(prompt.token_ids), one)
                asked.append(_Asked(prompt, request))
            return asked

        return self._answer(ask, progress)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` take where they are given none: the model's own, see `generation_config`. What is
        not said there is as in `SamplingParams()`, the length too."""
        said = asdict(self._running.parts.sampling_defaults)
        longest = said.pop("max_tokens")
        del said["most_tokens"]  # of a server
        return SamplingParams(**said) if longest is None else SamplingParams(**said, max_tokens=longest)

    def get_tokenizer(self) -> Tokenizer:
        return self._running.parts.tokenizer

    def close(self) -> None:
        """Twice is once."""
        self._thread.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _params_of_each(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.get_default_sampling_params()] * count
        if len(given) != count:
            raise ValueError(f"{count} prompts came with {len(given)} sampling params")
        return list(given)

    def _answer(self, ask: Callable[[], Coroutine[Any, Any, list[_Asked]]], progress: bool) -> list[RequestOutput]:
        try:
            asked = self._thread.call(ask())
            if not asked:
                return []
            with request_bar(len(asked), progress) as bar:
                return self._thread.call(self._answer_all(asked, _Run(bar)))
        except ApiError as error:
            raise (ValueError if error.status < 500 else RuntimeError)(str(error)) from error

    async def _answer_all(self, asked: Sequence[_Asked], run: _Run) -> list[RequestOutput]:
        """The first failure ends them all."""
        running = self._running
        seats = asyncio.Semaphore(running.at_once)
        prepared = [
            choices_of(
                each.request,
                sampling_params(each.request, running.parts.vocab_size),
                [each.prompt.token_ids],
                running.engine,
                running.parts.tokenizer,
                running.metrics,
            )
            for each in asked
        ]

        async def answer(index: int) -> RequestOutput:
            tally = Tally(prepared[index])
            async with seats:
                found = await collected(prepared[index], tally)
            run.add(tally)
            return _output(running.parts.tokenizer, str(index), asked[index], found, tally)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(index)) for index in range(len(asked))]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]


def _as_list(prompts: Any) -> list[str | list[int]]:
    if isinstance(prompts, str):
        return [prompts]
    each = list(prompts)
    if each and all(isinstance(item, int) for item in each):
        return [each]
    return [item if isinstance(item, str) else list(item) for item in each]


def _request(prompt: str | list[int], params: SamplingParams) -> CompletionRequest:
    """Raises ValueError, ApiError."""
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(params).items()}
    if params.logit_bias is not None:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    request = _checked(_OfflineRequest, {**fields, "prompt": prompt})
    check_supported(request)
    return request


def _checked(kind: type[M], fields: Mapping[str, Any]) -> M:
    """Raises ValueError with one line, or ApiError."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from error


def _output(
    tokenizer: Tokenizer, request_id: str, asked: _Asked, found: Sequence[Collected], tally: Tally
) -> RequestOutput:
    shown = best(found, asked.request.tries, asked.request.choices)
    of_prompt, text = found[0].prompt_logprobs, asked.prompt.text
    if text is None:  # it was ids
        text = tokenizer.decode(asked.prompt.token_ids, skip_special_tokens=False)
    return RequestOutput(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=list(asked.prompt.token_ids),
        prompt_logprobs=None if of_prompt is None else [None, *(_logprobs(tokenizer, entry) for entry in of_prompt)],
        outputs=[
            CompletionOutput(
                index=index,
                text=one.text,
                token_ids=one.token_ids,
                cumulative_logprob=sum(entry.logprob for entry in one.logprobs) if one.logprobs else None,
                logprobs=None
                if asked.request.logprobs is None
                else [_logprobs(tokenizer, entry) for entry in one.logprobs],
                finish_reason=one.last.finish_reason,
                stop_reason=one.last.stop_reason,
            )
            for index, one in enumerate(shown)
        ],
        num_cached_tokens=tally.cached_tokens,
    )


def _logprobs(tokenizer: Tokenizer, entry: sequence.TokenLogprobs) -> LogprobsOfToken:
    ranked = {
        token_id: Logprob(p, rank, tokenizer.token_text(token_id)) for rank, (token_id, p) in enumerate(entry.top, 1)
    }
    sampled = Logprob(entry.logprob, entry.rank or None, tokenizer.token_text(entry.token_id))
    return {entry.token_id: sampled} | {i: one for i, one in ranked.items() if i != entry.token_id}


class _EventLoopThread:
    """An event loop on a thread of its own, and one context that is open there until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._context: AbstractAsyncContextManager[Any] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        try:
            entered = self.call(context.__aenter__())
        except Exception:
            self.close()
            raise
        # Whoever interrupts a load leaves the thread behind: what reads or fetches a model cannot be interrupted.
        self._context = context
        return entered

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for it; whatever interrupts the waiting cancels the work, and waits until that has ended."""
        if self._closed:
            work.close()
            raise RuntimeError("this LLM is closed")
        ended = threading.Event()

        async def watched() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                ended.wait(_CANCEL_SECONDS)
            raise

    def close(self) -> None:
        if self._closed:
            return
        if self._context is not None:
            self.call(self._context.__aexit__(None, None, None))
        self.call(self._loop.shutdown_default_executor())
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
