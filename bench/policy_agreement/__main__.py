"""Does the simulator agree with what it simulates? Real processes, and the simulator given what their client sent.

    make bench-agreement [ARGS="--resume --page"]

- one engine: the real small model on one core, the client on another, against the simulator with the table that
  `poolwright-engine profile` makes of that very machine. Within 10 % at P50 and P90 of TTFT and TBT; steps within 8 %.
- many engines: six real engine processes behind the real router, whose devices are paced by a table of step times.
  Within 5 % at P50 and P90, 10 % at P99.

Five repeats of each; no allowance is smaller than the distance of the real runs from their own median. At most 12
minutes. Every repeat is written to build/bench/agreement.json at once; `--resume` keeps those that are there, and
`--page` brings docs/reference/simulator-agreement.md up to date. `--quick` is two machines for seconds, to a file of
its own, never to the docs. The exit code is 1 where something does not agree: a latency, the time of steps, or fewer
gaps than such percentiles ask for.
"""

import argparse
import asyncio
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from bench.policy_agreement import many_engines, one_engine, page
from bench.policy_agreement.store import Section, Store

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = (one_engine.NAME, many_engines.NAME)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each section (default: %(default)s)")
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--resume", action="store_true", help="keep the repeats that the file has")
    parser.add_argument("--page", action="store_true", help="write the tables into the docs")
    parser.add_argument("--quick", action="store_true", help="a look at small sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="instead of build/bench/agreement.json")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats: expected at least 1")
    if options.quick and options.page:
        parser.error("--quick is not for the docs")
    name = "agreement.quick.json" if options.quick else "agreement.json"
    store = Store(options.json or ROOT / "build" / "bench" / name, options.resume)
    asyncio.run(_run(store, options))
    found = {name: section for name, section in store.sections().items() if "rows" in section}
    if options.page:
        page.write(found, about())
    return 0 if found and all(map(page.agrees, found.values())) else 1


async def _run(store: Store, options: argparse.Namespace) -> None:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", file=sys.stderr, flush=True)

    for name in SECTIONS if options.only is None else (options.only,):
        say(name)
        section: Section
        if name == many_engines.NAME:
            setup = many_engines.short() if options.quick else many_engines.standard()
            section = await many_engines.run(store, setup, options.repeats, say)
        elif options.quick:
            continue
        else:
            section = await one_engine.run(store, one_engine.standard(_two_cores()), options.repeats, say)
        print(f"{name}\n\n{page.shown(section)}", flush=True)


def _two_cores() -> tuple[int, int] | None:
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else None


def about() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {"processor": names[0] if names else platform.machine(), "cores": os.cpu_count()}


if __name__ == "__main__":
    sys.exit(main())
