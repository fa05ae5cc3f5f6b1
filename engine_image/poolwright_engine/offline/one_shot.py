"""`poolwright-engine generate`: one prompt through the real loop, its text printed as it comes."""

import sys
from contextlib import aclosing

from poolwright_engine.api.api_error import ApiError
from poolwright_engine.api.generation import pieces
from poolwright_engine.api.openai_api import fit_max_tokens
from poolwright_engine.process import assembly
from poolwright_engine.process.config import ConfigError, EngineConfig
from poolwright_engine.scheduling.sequence import Request, SamplingParams
from poolwright_engine.text.stop_strings import StopStrings
from poolwright_engine.text.tokenizer import ChatTemplateError, Tokenizer


async def generate(config: EngineConfig, prompt: str, max_tokens: int, temperature: float, raw: bool) -> int:
    """`raw`: the prompt is continued as it is; otherwise it is a user's message. Raises ConfigError."""
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens: expected a positive integer, not {max_tokens}")
    if temperature < 0:
        raise ConfigError(f"--temperature: expected 0 or more, not {temperature}")
    async with assembly.running(config) as running:
        tokenizer = running.parts.tokenizer
        prompt_ids = _prompt_ids(tokenizer, prompt, raw)
        try:
            max_tokens = fit_max_tokens(len(prompt_ids), max_tokens, running.parts.max_model_len)
        except ApiError as error:
            raise ConfigError(f"--prompt: {error}") from error
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=config.seed or 0)
        request, detokenizer = Request("one-shot", prompt_ids, params), tokenizer.detokenizer(prompt_ids)
        async with aclosing(pieces(running.engine, request, detokenizer, StopStrings(), running.metrics)) as made:
            async for piece in made:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        sys.stdout.write("\n")
    return 0


def _prompt_ids(tokenizer: Tokenizer, prompt: str, raw: bool) -> tuple[int, ...]:
    try:
        text = prompt if raw else tokenizer.render_chat([{"role": "user", "content": prompt}])
    except ChatTemplateError as error:
        raise ConfigError(f"--prompt: {error}") from error
    prompt_ids = tuple(tokenizer.encode(text, add_special_tokens=raw))
    if not prompt_ids:
        raise ConfigError("--prompt: it holds no tokens")
    return prompt_ids
