"""An engine as users run it but for its device, which is watched or paced: `python -m bench.policy_agreement.engine`.

    … engine --steps FILE serve MODEL …                  the real runner; each step's content and time go to FILE
    … engine --paced MACHINE --kv-tokens N serve MODEL …  no model computes: steps take what the machine's table says

Command line, HTTP, tokenizer, loop, scheduler, hand-off and shutdown are the engine's own.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from bench.policy_agreement.paced_runner import KV_SHAPE, PacedRunner
from bench.policy_agreement.slowed import SlowedStepTime
from bench.policy_agreement.watched_runner import WatchedRunner

from poolwright.sim import profiles
from poolwright_engine.process.config import Device, EngineConfig, plan
from poolwright_engine.process.openmp import spin_briefly
from poolwright_engine.process.source import Progress

if TYPE_CHECKING:
    from poolwright_engine.process.assembly import Parts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=Path, metavar="FILE")
    parser.add_argument("--paced", metavar="MACHINE")
    parser.add_argument("--slowed", type=float, default=1.0, metavar="TIMES")
    parser.add_argument("--kv-tokens", type=int, default=65536)
    parser.add_argument("--core", type=int, help="run on this core alone")
    own, words = parser.parse_known_args()
    if own.core is not None:
        os.sched_setaffinity(0, {own.core})
    spin_briefly()
    from poolwright_engine.cli.main import main as engine_main
    from poolwright_engine.process import assembly

    real = assembly.load

    def load(config: EngineConfig, fetching: Progress | None = None) -> assembly.Parts:
        parts = real(config, fetching) if own.paced is None else _paced(config, own.paced, own.slowed, own.kv_tokens)
        return parts if own.steps is None else replace(parts, runner=WatchedRunner(parts.runner, own.steps))

    # The one thing that differs: what the process takes for its model and its device.
    with patch.object(assembly, "load", load):
        return engine_main(words)


def _paced(config: EngineConfig, machine: str, slowed: float, kv_tokens: int) -> "Parts":
    from poolwright_engine.checkpoint.gguf import read_gguf
    from poolwright_engine.process import assembly
    from poolwright_engine.sampling.guide import Guides

    checkpoint = read_gguf(Path(config.model))
    tokenizer, vocab_size = checkpoint.tokenizer, checkpoint.config.vocab_size
    runner = PacedRunner(
        SlowedStepTime(profiles.machine(machine).step_time, slowed),
        KV_SHAPE,
        vocab_size=vocab_size,
        num_blocks=kv_tokens // config.block_size + 1,
        block_size=config.block_size,
    )
    return assembly.Parts(
        runner,
        tokenizer,
        vocab_size,
        max(len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size)),
        f"paced as {machine}",
        Guides(tokenizer, vocab_size),
        plan(config, Device("cpu"), config.max_model_len or checkpoint.config.context_length),
        checkpoint.config,
        "float32",
        None,
    )


if __name__ == "__main__":
    sys.exit(main())
