"""`poolwright-engine generate`: one prompt through the real loop, its text printed as it comes."""

import sys
from contextlib import aclosing

from poolwright_engine import assembly
from poolwright_engine.config import ConfigError, EngineConfig
from poolwright_engine.generation import pieces
from poolwright_engine.metrics import EngineMetrics
from poolwright_engine.openai_api import ApiError, fit_max_tokens
from poolwright_engine.sequence import Request, SamplingParams
from poolwright_engine.stop_strings import StopStrings
from poolwright_engine.tokenizer import ChatTemplateError


async def generate(config: EngineConfig, prompt: str, max_tokens: int, temperature: float, raw: bool) -> int:
    """`raw`: the prompt is continued as it is; otherwise it is a user's message. Raises ConfigError."""
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens: expected a positive integer, not {max_tokens}")
    if temperature < 0:
        raise ConfigError(f"--temperature: expected 0 or more, not {temperature}")
    parts = assembly.load(config)
    try:
        text = prompt if raw else parts.tokenizer.render_chat([{"role": "user", "content": prompt}])
        prompt_ids = tuple(parts.tokenizer.encode(text, add_special_tokens=raw))
        if not prompt_ids:
            raise ConfigError("--prompt: it holds no tokens")
        max_tokens = fit_max_tokens(len(prompt_ids), max_tokens, parts.max_model_len)
    except (ChatTemplateError, ApiError) as error:
        raise ConfigError(f"--prompt: {error}") from error
    metrics = EngineMetrics(config.served_model_name, config.pool, config.pool_namespace, config.pod_uid)
    engine = assembly.engine_loop(config, parts)
    await engine.start()
    try:
        request = Request("one-shot", prompt_ids, SamplingParams(max_tokens=max_tokens, temperature=temperature))
        detokenizer = parts.tokenizer.detokenizer(prompt_ids)
        async with aclosing(pieces(engine, request, detokenizer, StopStrings(), metrics)) as made:
            async for piece in made:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        sys.stdout.write("\n")
    finally:
        await engine.close()
    return 0
