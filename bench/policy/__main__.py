"""`make bench-policy`: Poolwright's policy beside the published ones, in the cells of `cells.yaml`.

    python -m bench.policy                                   all cells, within --minutes; again: what is left
    python -m bench.policy --quick                           few, short, on one core
    python -m bench.policy --cell code-70b-n4 --policy ours --policy static:2/1/1 --seed 1
    python -m bench.policy --ablation | --sensitivity        what parts of ours, and wrong beliefs, are worth
    python -m bench.policy --full --cell code-70b-n4         goodput by bisection, published policies tuned

Every finished run is kept under --folder and not computed again until its inputs or its code change; --estimate says
how long what is left takes. The exit code is 1 where something attained more than the bound allows, for then the bound
or the run is wrong, and where a run ended by a fault of the program.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from bench.policy import contenders, estimate, full, schedule, studies, table
from bench.policy.cells import Cell, cells
from bench.policy.crew import Crew, cores
from bench.policy.known import Known
from bench.policy.runs import Run
from bench.policy.schedule import DEFAULT, FULL, QUICK, Effort
from bench.policy.verdict import Judged, judge

from poolwright.sim.traces import Copies

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130
QUICK_SECONDS = 60.0  # of each trace
QUICK_MINUTES, DEFAULT_MINUTES = 2.0, 28.0


def main() -> int:
    options = _parser().parse_args()
    try:
        every = cells()
        chosen = _chosen(every, options.cell)
        if options.list:
            return _list(every)
        known = Known(options.folder, options.again)
        if options.share is not None:
            chosen = {name: replace(cell, share=options.share) for name, cell in chosen.items()}
        if options.policy:
            for name in options.policy:
                _check(name, chosen.values())
            return _narrow(options, chosen, known)
        if options.ablation or options.sensitivity:
            return _studies(options, _chosen(every, options.cell or studies.CELLS), known)
        return _compare(options, chosen, known)
    except (ValueError, OSError) as error:
        refuse(str(error))


def refuse(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.policy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="few cells and policies, two draws, one core, 2 minutes")
    what.add_argument("--full", action="store_true", help="all policies, goodput and tuning; hours, resumable")
    what.add_argument("--ablation", action="store_true", help="each part of ours off, one at a time")
    what.add_argument("--sensitivity", action="store_true", help="ours with wrong beliefs")
    what.add_argument("--list", action="store_true", help="cells and policies")
    parser.add_argument("--estimate", action="store_true", help="how long it takes, and run nothing")
    parser.add_argument("--cell", action="append", default=[], metavar="NAME", help="only this one; repeatable")
    parser.add_argument("--policy", action="append", default=[], metavar="NAME", help="only this one; repeatable")
    parser.add_argument("--seed", action="append", default=[], type=int, metavar="K", help="draws, 1 to 5 by default")
    parser.add_argument("--copies", choices=[copies.value for copies in Copies], default=Copies.JITTERED.value)
    parser.add_argument("--share", type=float, help="of the fluid bound, instead of the cell's")
    parser.add_argument(
        "--minutes", type=float, help=f"after which no run is started; {DEFAULT_MINUTES:g}, --full: none"
    )
    parser.add_argument("--workers", type=int, help="processes; as many as there are cores")
    parser.add_argument("--again", action="store_true", help="compute what is known already")
    parser.add_argument(
        "--page", action="store_true", help="write docs/reference/policy-comparison.md, where all cells were asked for"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench" / "policy", help="where runs are kept")
    parser.add_argument("--json", type=Path, help="build/bench/policy.json, --full: policy-full.json beside it")
    return parser


def _chosen(every: Mapping[str, Cell], names: Sequence[str]) -> dict[str, Cell]:
    unknown = [name for name in names if name not in every]
    if unknown:
        raise ValueError(f"there is no cell {', '.join(unknown)} among {', '.join(every)}")
    return {name: every[name] for name in names or every}


def _check(name: str, chosen: Iterable[Cell]) -> None:
    """Raises ValueError before anything runs."""
    base = contenders.parts(name)[0]
    if base == contenders.OURS:
        contenders.our_options(name)
    if base == contenders.STATIC:
        for cell in chosen:
            contenders.split_of(name, cell)


def _crew(options: argparse.Namespace, known: Known) -> Crew:
    minutes = options.minutes
    if minutes is None:
        minutes = (
            QUICK_MINUTES if options.quick else float("inf") if options.full or options.policy else DEFAULT_MINUTES
        )
    return Crew(known, options.workers or (1 if options.quick else cores()), minutes * 60)


def _list(every: Mapping[str, Cell]) -> int:
    for cell in every.values():
        aim = "nine percentiles" if cell.nine else f"{cell.cap:g} x"
        print(f"{cell.name:32} {cell.machines:2} x {cell.machine:20} {aim:16} share {cell.share:g}")
    own = ", ".join((contenders.OURS, *contenders.SHIPPED, "held:P/T/M", "static:P/T/M"))
    print(f"policies: {own}, {', '.join(contenders.PUBLISHED)}; each +early or +predicted")
    return 0


def _narrow(options: argparse.Namespace, chosen: Mapping[str, Cell], known: Known) -> int:
    seeds = options.seed or list(range(1, DEFAULT.seeds + 1))
    copies = Copies(options.copies)
    if options.quick:
        chosen = _shortened(chosen)

    def stages(cell: Cell) -> schedule.Stages:
        return schedule.narrow(cell, known, options.policy, seeds, copies)

    crew = _crew(options, known)
    crew.workers = min(crew.workers, len(chosen) * len(options.policy) * len(seeds))
    crew.work(chosen, stages)
    runs: list[Run] = []
    for cell in chosen.values():
        *_, last = stages(cell)
        runs += last
    print("\n".join(table.run_lines(runs, known)))
    crashed = [run.label for run in runs if (result := known(run)) is not None and result.crashed]
    return _end(crew) or _said_wrong([f"{label} failed" for label in crashed])


def _shortened(chosen: Mapping[str, Cell]) -> dict[str, Cell]:
    return {name: schedule.shortened(cell, QUICK_SECONDS) for name, cell in chosen.items() if cell.quick}


def _studies(options: argparse.Namespace, chosen: Mapping[str, Cell], known: Known) -> int:
    variants = studies.ablation() if options.ablation else studies.sensitivity()
    seeds = options.seed or studies.SEEDS
    crew = _crew(options, known)
    if _estimated(options, chosen, known, crew, lambda cell, of: studies.stages(cell, of, variants, seeds)):
        return 0
    crew.work(chosen, lambda cell: studies.stages(cell, known, variants, seeds))
    found = {cell.name: studies.effects(cell, known, variants, seeds) for cell in chosen.values()}
    for name, effects in found.items():
        print("\n".join(table.effect_lines(name, effects)) + "\n")
    if options.page and not options.cell:
        from bench.policy import page

        page.write_study("ablation" if options.ablation else "sensitivity", found)
    return _end(crew)


def _compare(options: argparse.Namespace, chosen: Mapping[str, Cell], known: Known) -> int:
    effort: Effort = QUICK if options.quick else FULL if options.full else DEFAULT
    if options.seed:
        effort = replace(effort, seeds=max(options.seed))
    if options.quick:
        chosen = _shortened(chosen)
    make = full.stages if options.full else schedule.comparison
    began = time.monotonic()
    crew = _crew(options, known)
    if _estimated(options, chosen, known, crew, lambda cell, of: make(cell, of, effort)):
        return 0
    crew.work(chosen, lambda cell: make(cell, known, effort))
    found = [judged for cell in chosen.values() if (judged := judge(cell, known, effort)) is not None]
    for judged in found:
        print("\n".join(table.cell_lines(judged)) + "\n")
    more: dict[str, object] = {}
    if options.full:
        more = {"goodput": _goodputs(chosen, known, effort)}
    print("\n".join(table.summary_lines(found)))
    target = options.json or options.folder.parent / ("policy-full.json" if options.full else "policy.json")
    wall = time.monotonic() - began
    spent = {"wall_seconds": round(wall), "cpu_seconds": round(sum(crew.seconds.values())), "workers": crew.workers}
    written = table.document(found, effort=asdict(effort), complete=crew.complete, spent=spent, **more)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(written, indent=1) + "\n"
    target.write_text(text)
    if options.full:
        digest = hashlib.sha256(text.encode()).hexdigest()
        target.with_name(f"{target.name}.sha256").write_text(f"{digest}  {target.name}\n")
    print(f"{crew.done} runs in {wall:.0f} s, {sum(crew.seconds.values()):.0f} s of CPU; in {target}")
    if options.page and effort is DEFAULT and not options.cell:
        from bench.policy import page

        page.write(found, _spent(found, crew))
    faults = [f"{judged.cell.name}: {fault}" for judged in found for fault in (*judged.faults, *judged.crashes)]
    return _end(crew) or _said_wrong(faults)


def _said_wrong(faults: Sequence[str]) -> int:
    for fault in faults:
        print(f"WRONG: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _estimated(
    options: argparse.Namespace,
    chosen: Mapping[str, Cell],
    known: Known,
    crew: Crew,
    stages: estimate.MakeStagesOf,
) -> bool:
    """Says how long it takes; True where no more was asked for."""
    said = estimate.left(chosen.values(), known, stages).text(crew.workers, crew.limit_seconds)
    print(said, flush=True)
    return bool(options.estimate)


def _goodputs(chosen: Mapping[str, Cell], known: Known, effort: Effort) -> dict[str, object]:
    result: dict[str, object] = {}
    for cell in chosen.values():
        try:
            found = full.goodputs(cell, known, full.all_names(cell, known, effort))
        except full.Missing as missing:
            print(f"{cell.name}: goodput not known yet, {missing}")
            continue
        result[cell.name] = [asdict(one) for one in found]
        print("\n".join(table.goodput_lines(cell, found)) + "\n")
    return result


def _spent(found: Sequence[Judged], crew: Crew) -> str:
    complete = "complete" if crew.complete else "not complete: what is open was not run yet"
    draws = sum(row.draws for judged in found for row in judged.rows)
    return f"*{draws} draws of {len(found)} cells; {complete}.*"


def _end(crew: Crew) -> int:
    if crew.interrupted:
        print("Interrupted: this is what was known by then; the same command goes on")
        return INTERRUPTED
    if not crew.complete:
        print("Time is over: the same command goes on")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
