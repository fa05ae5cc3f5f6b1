"""One section of `make gpu`, as a process: `python -m bench.gpu.section NAME FILE cuda|cpu full|tiny`."""

import importlib
import sys
import types
from pathlib import Path

from bench.gpu.harness import Bench, Skipped


def main() -> None:
    name, target, device, size = sys.argv[1:]
    _without_guides()
    bench = Bench(name, Path(target), device, tiny=size == "tiny")
    try:
        line = importlib.import_module(f"bench.gpu.{name}").run(bench)
    except Skipped as reason:
        bench.end("skipped", str(reason))
    else:
        bench.end("failed" if bench.failures else "ok", "; ".join(bench.failures) or line)


def _without_guides() -> None:
    """The engine imports llguidance, which a machine for measuring need not have: nothing here follows a guide."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        absent = types.ModuleType("llguidance")
        for name in ("LLMatcher", "LLParserLimits", "LLTokenizer", "TokenizerWrapper", "grammar_from"):
            setattr(absent, name, None)
        sys.modules["llguidance"] = absent


if __name__ == "__main__":
    main()
