"""One request's tokens as its client sees them: text with stop strings applied, one piece for each sampled token.

Owns what lies between the engine's token ids and a response, and measures it. Closing `pieces` aborts the request in
the engine and frees what it held.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from poolwright_engine.api.api_error import ApiError
from poolwright_engine.api.metrics import EngineMetrics
from poolwright_engine.loop.engine import Engine, Refused
from poolwright_engine.scheduling.sequence import FinishReason, Request, TokenLogprobs, TokenOutput
from poolwright_engine.text.stop_strings import StopStrings
from poolwright_engine.text.tokenizer import Detokenizer

SHUTDOWN_RETRY_SECONDS = 1  # another machine may take it at once


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one sampled token. `token_id` is None only where the end comes alone. `text` may be empty: in the middle
    of a character, or held back for a stop string. `stop_reason` is the stop string or stop token met. What there is to
    say of the prompt comes with the first: how much of it was cached, and its log probabilities from its second token
    on."""

    token_id: int | None
    text: str
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


async def pieces(
    engine: Engine,
    request: Request,
    detokenizer: Detokenizer,
    stops: StopStrings,
    metrics: EngineMetrics,
    include_stop_in_output: bool = False,
    at_end: Callable[[int], None] | None = None,
) -> AsyncGenerator[Piece, None]:
    """`at_end` hears how many tokens it came to, also of what was aborted. Raises ApiError where the engine refuses the
    request, fails or is shut down."""
    ended = FinishReason.ABORT  # unless it turns out otherwise: the client left
    count = 0
    tokens = engine.generate(request)
    try:
        async with aclosing(tokens):
            async for output in tokens:
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    ended = output.finish_reason
                    raise _broken_off(output)
                free = request.params.min_tokens - count  # so many more cannot end it
                for piece in _pieces_of(output, detokenizer, stops, include_stop_in_output, free):
                    count += 1
                    if piece.finish_reason is not None:
                        ended = FinishReason(piece.finish_reason)
                    yield piece
                    if piece.finish_reason is not None:
                        return
        ended = FinishReason.ERROR
        raise ApiError(500, "The engine ended the request without saying why.")
    except Refused as refusal:
        ended = FinishReason.ERROR
        raise ApiError(refusal.status, str(refusal), retry_after_seconds=refusal.retry_after_seconds) from refusal
    finally:
        metrics.finished_as(ended)
        if at_end is not None:
            at_end(count)


def _pieces_of(
    output: TokenOutput, detokenizer: Detokenizer, stops: StopStrings, include_stop_in_output: bool, free: int
) -> list[Piece]:
    """One per token; the finish is on the last. What follows a completed stop string is dropped. `free`: so many tokens
    do not end the text with a stop string."""
    finish = output.finish_reason
    made: list[Piece] = []
    last = len(output.token_ids) - 1
    for index, token_id in enumerate(output.token_ids):
        final = index == last and finish is not None
        # The token that ends a request (eos or a stop id) is counted, but is no text.
        silent = final and finish is FinishReason.STOP and not include_stop_in_output
        text, met = ("", None) if silent else stops.push(detokenizer.push(token_id), index >= free)
        reason = finish.value if final and finish is not None else None
        piece = Piece(
            token_id,
            text if met is not None or reason is None else text + stops.flush(),
            output.logprobs[index] if output.logprobs else None,
            reason if met is None else FinishReason.STOP.value,
            met if met is not None else output.stop_token_id if final else None,
            output.num_cached_tokens if index == 0 else None,
            output.prompt_logprobs if index == 0 else None,
        )
        made.append(piece)
        if met is not None:
            return made
    if not made and finish is not None:
        made.append(Piece(None, stops.flush(), None, finish.value, output.stop_token_id))
    return made


def _broken_off(output: TokenOutput) -> ApiError:
    if output.finish_reason is FinishReason.ABORT:
        message = output.error or "The request was aborted: this machine is shutting down."
        return ApiError(503, message, retry_after_seconds=SHUTDOWN_RETRY_SECONDS)
    return ApiError(500, output.error or "The engine failed.")
