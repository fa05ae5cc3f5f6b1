"""One client's request as several of the engine: a request for each choice of each prompt, told apart by index.

Owns order (prompt after prompt, each with its choices), names and seeds, what they add up to, and that all end when one
fails or the client goes. Knows no body and no HTTP.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from poolwright_engine.api.api_error import bad_parameter
from poolwright_engine.api.generation import Piece, pieces
from poolwright_engine.api.metrics import EngineMetrics
from poolwright_engine.api.openai_api import GenerationRequest, fit_max_tokens
from poolwright_engine.api.routed import UNROUTED, Routed
from poolwright_engine.api.sampling_options import of_choice
from poolwright_engine.loop.engine import Engine
from poolwright_engine.scheduling.sequence import Request, SamplingParams, TokenLogprobs
from poolwright_engine.text.stop_strings import StopStrings
from poolwright_engine.text.tokenizer import Tokenizer

# Enough of the prompt for the decoder to know whether a leading space belongs to the first token; the whole of it
# would be decoded once more at the first token.
_DECODER_CONTEXT_TOKENS = 16
_STARTED_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Choice:
    """`start` enters it into the engine; closing what it gives aborts it."""

    index: int
    prompt: int
    prompt_ids: tuple[int, ...]
    start: Callable[[], AsyncGenerator[Piece, None]]


def choices_of(
    asked: GenerationRequest,
    params: SamplingParams,
    prompts: Sequence[tuple[int, ...]],
    engine: Engine,
    tokenizer: Tokenizer,
    metrics: EngineMetrics,
    routed: Routed = UNROUTED,
) -> list[Choice]:
    """Everything that can be refused is refused here, before anything starts. Raises ApiError.

    Names are drawn, whatever id a client gives: two clients may give the same.
    """
    name, stops, tries = secrets.token_hex(8), asked.stops, asked.tries
    with_stop = asked.include_stop_str_in_output
    made: list[Choice] = []
    for number, prompt_ids in enumerate(prompts):
        if not prompt_ids:
            raise bad_parameter("The prompt holds no tokens.", "prompt")
        max_tokens = fit_max_tokens(len(prompt_ids), params.max_tokens, engine.max_model_len)
        context = prompt_ids[-_DECODER_CONTEXT_TOKENS:]
        siblings = _Siblings(metrics, tries)
        for order in range(tries):
            request = Request(
                f"{name}-{len(made)}",
                prompt_ids,
                of_choice(params, asked, order, max_tokens),
                prompt_machine=routed.prompt_machine,
                priority=asked.priority,
                relegated=routed.relegated,
                cache_salt=asked.cache_salt or "",
                siblings=f"{name}-{number}" if tries > 1 else None,
            )

            def start(
                request: Request = request, context: tuple[int, ...] = context, siblings: _Siblings = siblings
            ) -> AsyncGenerator[Piece, None]:
                detokenizer = tokenizer.detokenizer(context, asked.skip_special_tokens)
                stopping = StopStrings(stops, with_stop)
                return pieces(engine, request, detokenizer, stopping, metrics, with_stop, siblings.ended)

            made.append(Choice(len(made), number, prompt_ids, start))
    return made


class _Siblings:
    """The choices of one prompt, until the last has ended."""

    def __init__(self, metrics: EngineMetrics, tries: int) -> None:
        self._metrics = metrics
        self._tries = self._left = tries
        self._most = 0

    def ended(self, tokens: int) -> None:
        self._most = max(self._most, tokens)
        self._left -= 1
        if not self._left:
            self._metrics.answered(self._tries, self._most)


@dataclass(slots=True)
class Tally:
    """What the choices of one request came to, so far. Cached tokens are those of each prompt's first choice to
    say: the others find in the cache what that one computed."""

    choices: Sequence[Choice]
    completion_tokens: list[int] = field(init=False)
    _cached: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.completion_tokens = [0] * len(self.choices)

    def add(self, index: int, piece: Piece) -> None:
        self.completion_tokens[index] += piece.token_id is not None
        if piece.num_cached_tokens is not None:
            self._cached.setdefault(self.choices[index].prompt, piece.num_cached_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Once for each prompt, however many choices it has."""
        return sum({choice.prompt: len(choice.prompt_ids) for choice in self.choices}.values())

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())


class Collected:
    """One choice of a client that does not stream."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.last = Piece(None, "")

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        if piece.token_id is not None:
            self.token_ids.append(piece.token_id)
        if piece.logprobs is not None:
            self.logprobs.append(piece.logprobs)
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs
        self.last = piece

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def mean_logprob(self) -> float:
        return sum(each.logprob for each in self.logprobs) / max(1, len(self.logprobs))


async def collected(choices: Sequence[Choice], tally: Tally) -> list[Collected]:
    """All of every choice, in their order. Raises ApiError."""
    found = [Collected(choice) for choice in choices]
    async with aclosing(merged([choice.start() for choice in choices])) as made:
        async for index, piece in made:
            tally.add(index, piece)
            found[index].add(piece)
    return found


def best(found: Sequence[Collected], tries: int, wanted: int) -> list[Collected]:
    """The `wanted` likeliest of each prompt's `tries`, by mean log probability of a token."""
    if tries == wanted:
        return list(found)
    groups = [found[at : at + tries] for at in range(0, len(found), tries)]
    return [each for group in groups for each in sorted(group, key=lambda one: -one.mean_logprob)[:wanted]]


async def merged(sources: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pieces of all sources as they come. The first failure ends them all; closing this closes them all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for piece in only:
                yield 0, piece
        return
    ready: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue(maxsize=len(sources))

    async def pump(index: int, source: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(source):
                async for piece in source:
                    await ready.put((index, piece))
            await ready.put(None)
        except Exception as error:
            await ready.put(error)

    pumps: list[asyncio.Task[None]] = []
    try:
        for index, source in enumerate(sources):
            if pumps and not index % _STARTED_AT_ONCE:
                await asyncio.sleep(0)  # the event loop serves others in between
            pumps.append(asyncio.create_task(pump(index, source)))
        running = len(pumps)
        while running:
            item = await ready.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
