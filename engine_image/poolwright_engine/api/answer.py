"""What the endpoints share: the model that is served, and an answer that can be streamed or given at once.

Knows no HTTP and no body.
"""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from poolwright_engine.api.api_error import bad_request
from poolwright_engine.api.openai_api import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    check_supported,
)
from poolwright_engine.api.prompts import Prompts
from poolwright_engine.api.sampling_options import NEUTRAL, SamplingDefaults, sampling_params
from poolwright_engine.loop.engine import Engine
from poolwright_engine.sampling.guide import Guides
from poolwright_engine.scheduling.sequence import SamplingParams
from poolwright_engine.text.tokenizer import Tokenizer

_COMPILING = 10**6  # a grammar may take a second: never on the event loop


@dataclass(frozen=True, slots=True)
class Answer:
    """`chunks` for a client that streams, `body` for one that does not; only one of them is ever started."""

    chunks: Callable[[], AsyncGenerator[bytes, None]]
    body: Callable[[], Coroutine[Any, Any, dict[str, Any]]]


class Served:
    """What there is to serve once the model is loaded. `vocab_size` is the model's: what it can embed. Without `guides`
    guided output is refused."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_chars_per_token: int,
        guides: Guides | None = None,
        defaults: SamplingDefaults = NEUTRAL,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.prompts = Prompts(tokenizer, vocab_size, engine.max_model_len, max_chars_per_token)
        self._guides = guides
        self._defaults = defaults

    async def params_of(self, asked: CompletionRequest | ChatCompletionRequest) -> SamplingParams:
        """Raises ApiError."""
        check_supported(asked)
        params = sampling_params(asked, self.vocab_size, self._defaults)
        if params.guide is not None:
            guide, guides = params.guide, self._guides
            if guides is None:
                raise bad_request("Guided output is not supported with this model.", "structured_outputs")
            wrong = await self.prompts.in_thread(_COMPILING, lambda: guides.check(guide))
            if wrong is not None:
                raise bad_request(f"The output cannot be guided so: {wrong}.", "structured_outputs")
        return params

    def identity(self, kind: str, asked: GenerationRequest) -> tuple[str, int]:
        """Of an answer: its id, and when it was made in Unix seconds. The id names nothing within the engine."""
        return f"{kind}-{asked.request_id or secrets.token_hex(8)}", int(time.time())
