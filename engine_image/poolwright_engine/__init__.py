"""The bundled engine: chunked prefill over a paged KV cache, an OpenAI server, and KV hand-off between machines.

`LLM` is the engine for programs that use it without a server."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poolwright_engine.offline.llm import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Late: they bring torch, which most modules of this package must do without."""
    if name in __all__:
        from poolwright_engine.process.openmp import spin_briefly

        spin_briefly()
        from poolwright_engine.offline import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
