"""What papers and a lecture say in numbers, beside what this project's simulator, planner and ledger give.

    PYTHONPATH=. python -m bench.published [--only sarathi] [--quick] [--page]

Every number is asked of step times that others published (`bench/data/README.md`), none of which was changed to come
nearer. The whole takes less than five minutes on one core; `--page` writes docs/reference/published-figures.md.
`--quick` is for a look at short runs, and never for the page.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.published import distserve, ledger, sarathi, splitwise, streams
from bench.published.figure import FAR, Figure, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/published-figures.md"
OUTPUT = ROOT / "build/bench/published.json"

SECTIONS: Mapping[str, Callable[[bool], Sequence[Figure]]] = {
    "ledger": lambda quick: ledger.figures(),
    "streams": lambda quick: streams.figures(),
    "sarathi": lambda quick: sarathi.figures(*((1, 48) if quick else (3, 160))),
    "distserve": lambda quick: distserve.figures(30.0 if quick else 90.0),
    "splitwise": lambda quick: splitwise.figures(10.0 if quick else 30.0),
}
TITLES = {
    "ledger": "What a split moves",
    "streams": "A long prompt among 32 streams",
    "sarathi": "Sarathi-Serve",
    "distserve": "DistServe",
    "splitwise": "Splitwise",
}

OPENING = f"""# Published figures beside ours

Made by `make bench-published`: what papers and a lecture say in numbers, and what this project's simulator, planner
and KV ledger give under the conditions that the source states. Step times are those that the papers' authors or NVIDIA
published ([`bench/data`](../../bench/data/README.md)); none was changed to come nearer, and the column "ours by" names
the table. So a row says two things at once: whether the mechanism is modelled right, and whether the table is of the
same machine as the source's. It never says how quick this engine is.

"Ratio" is ours over the published figure, over the nearer end of a range; within the range it is 1. A cause stands
where the two are more than {FAR:.0%} apart; "unexplained" where none could be shown. "No data" has its reason.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, action="append")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.page and (options.only or options.quick):
        parser.error("--page is of the whole")
    began = time.monotonic()
    found: dict[str, list[Figure]] = {}
    for name in options.only or SECTIONS:
        found[name] = list(SECTIONS[name](options.quick))
        print(f"[{time.monotonic() - began:4.0f} s] {name}", file=sys.stderr, flush=True)
        print(table(found[name]))
    if not options.quick:
        OUTPUT.parent.mkdir(parents=True, exist_ok=True)
        rows = {
            name: [asdict(figure) | {"ratio": figure.ratio} for figure in figures] for name, figures in found.items()
        }
        OUTPUT.write_text(json.dumps(rows, indent=1) + "\n")
    if options.page:
        PAGE.write_text(page(found))


def page(found: Mapping[str, Sequence[Figure]]) -> str:
    every = [figure for figures in found.values() for figure in figures]
    numbers = [figure for figure in every if figure.ratio is not None]
    claims = [figure for figure in every if figure.holds is not None]
    far = [figure for figure in numbers if figure.is_far]
    counted = (
        f"Of {len(every)} rows, {len(numbers)} have both figures: {len(numbers) - len(far)} within {FAR:.0%}, "
        f"{sum(bool(f.why) for f in far)} further apart with a cause, {sum(not f.why for f in far)} unexplained. "
        f"Of {len(claims)} orders and placements {sum(bool(f.holds) for f in claims)} agree. "
        f"{sum(f.ours is None and f.holds is None for f in every)} rows have no data."
    )
    parts = [OPENING, counted + "\n"]
    for name, figures in found.items():
        module = sys.modules[f"bench.published.{name}"]
        words = (module.__doc__ or "").partition("\n\n")[2].strip()
        parts.append(f"## {TITLES[name]}\n" + (f"\n{words}\n" if words else "") + f"\n{table(figures)}")
    return "\n".join(parts)


if __name__ == "__main__":
    main()
