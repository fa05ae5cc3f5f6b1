"""One request's tokens as its client sees them: text with stop strings applied, one piece for each sampled token.

Owns what lies between the engine's token ids and a response, and measures it. Closing `pieces` aborts the request in
the engine and frees what it held.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from poolwright_engine.engine import Engine, Refused
from poolwright_engine.metrics import EngineMetrics
from poolwright_engine.openai_api import ApiError
from poolwright_engine.sequence import FinishReason, Request, TokenLogprobs, TokenOutput
from poolwright_engine.stop_strings import StopStrings
from poolwright_engine.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one sampled token. `token_id` is None only where the end comes alone. `text` may be empty: in the middle
    of a character, or held back for a stop string. `stop_reason` is the stop string or stop token met."""

    token_id: int | None
    text: str
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


async def pieces(
    engine: Engine,
    request: Request,
    detokenizer: Detokenizer,
    stops: StopStrings,
    metrics: EngineMetrics,
    include_stop_in_output: bool = False,
) -> AsyncGenerator[Piece, None]:
    """Raises ApiError where the engine refuses the request, fails or is shut down."""
    ended = FinishReason.ABORT  # unless it turns out otherwise: the client left
    tokens = engine.generate(request)
    try:
        async with aclosing(tokens):
            async for output in tokens:
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    ended = output.finish_reason
                    raise _broken_off(output)
                for piece in _pieces_of(output, detokenizer, stops, include_stop_in_output):
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


def _pieces_of(
    output: TokenOutput, detokenizer: Detokenizer, stops: StopStrings, include_stop_in_output: bool
) -> list[Piece]:
    """One per token; the finish is on the last. What follows a completed stop string is dropped."""
    finish = output.finish_reason
    made: list[Piece] = []
    last = len(output.token_ids) - 1
    for index, token_id in enumerate(output.token_ids):
        logprobs = output.logprobs[index] if output.logprobs else None
        final = index == last and finish is not None
        # The token that ends a request (eos or a stop id) is counted, but is no text.
        silent = final and finish is FinishReason.STOP and not include_stop_in_output
        text, met = ("", None) if silent else stops.push(detokenizer.push(token_id))
        if met is not None:
            made.append(Piece(token_id, text, logprobs, FinishReason.STOP.value, met))
            return made
        if final and finish is not None:
            made.append(Piece(token_id, text + stops.flush(), logprobs, finish.value, output.stop_token_id))
        else:
            made.append(Piece(token_id, text, logprobs))
    if not made and finish is not None:
        made.append(Piece(None, stops.flush(), None, finish.value, output.stop_token_id))
    return made


def _broken_off(output: TokenOutput) -> ApiError:
    if output.finish_reason is FinishReason.ABORT:
        return ApiError(503, output.error or "The request was aborted: this machine is shutting down.")
    return ApiError(500, output.error or "The engine failed.")
