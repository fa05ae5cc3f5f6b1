"""The pages of the docs that hold measurements: their tables and figures, from what the benches wrote.

    python bench/engine_pages.py strategies build/bench/engine_tables.json
    python bench/engine_pages.py speed build/bench/engine.json

Text between `<!-- begin: NAME -->` and `<!-- end: NAME -->` is made here, and the figures in `docs/images`; the words
around them are not. It measures nothing.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ROOT / "docs/explanation/batching-strategies.md"
SPEED = ROOT / "docs/reference/engine-speed.md"
IMAGES = ROOT / "docs/images"
COLORS = {"sarathi": "#1f6f8b", "vllm": "#c8553d", "orca": "#6b7a3a", "prefill-first": "#8a5a9e", "static": "#7a7a7a"}
SYSTEM_COLORS = ("#6b7a3a", "#c8553d", "#1f6f8b", "#8fc1d4")

Row = dict[str, Any]
Rows = Sequence[Row]


def strategies(found: Mapping[str, Any]) -> None:
    IMAGES.mkdir(exist_ok=True)
    # The same figures make the same files; text stays text.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "batching", "font.size": 9, "axes.grid": True})
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "grid.color": "#dddddd"})
    mpl.rcParams["axes.axisbelow"] = True
    for name, (columns, draw) in PARTS.items():
        if name not in found:
            continue
        rows = found[name]["rows"]
        figure = Figure(figsize=(7.2, 3.0), layout="constrained")
        draw(figure, rows)
        image = IMAGES / f"batching-{name}.svg"
        figure.savefig(image, metadata={"Date": None, "Creator": None})
        image.write_text(re.sub(r"[ \t]+$", "", image.read_text(), flags=re.MULTILINE))
        fill(
            STRATEGIES, name, f"![{name}](../images/{image.name})\n\n{table(rows, columns)}\n{_machine(found[name])}\n"
        )


def speed(found: Mapping[str, Any]) -> None:
    for name, section in found.items():
        kind = name.partition(" ")[0]
        if kind == "floor":
            text = _floor(section)
        else:
            ratios = [
                {
                    "comparison": each,
                    "median": statistics.median(of),
                    "lowest": min(of),
                    "highest": max(of),
                    "n": len(of),
                }
                for each, of in section["ratios"].items()
            ]
            text = f"{table(ratios, RATIOS)}\n{table(_servers(section['runs']), SERVERS)}\n{_where(section)}\n"
        fill(SPEED, name, text)


def fill(page: Path, name: str, made: str) -> None:
    begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{page} has no place for {name}")
    page.write_text(f"{before}{begin}{made}{end}{after}")


def table(rows: Rows, columns: Mapping[str, Callable[[Row], str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join("---" for _ in columns) + "|"]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _machine(section: Mapping[str, Any]) -> str:
    flags = " ".join(section["flags"]) or "no vector extension that matters"
    return (
        f"*float32, threads of the model: {section['threads']}, cores: {section['cores']} ({flags}); the best product "
        f"of matrices reaches {section['peak_gflops']:.0f} GFLOP/s; took {section['seconds']} s.*"
    )


def _where(section: Mapping[str, Any]) -> str:
    machine = section["machine"]
    return (
        f"*{machine['threads']} threads on {machine['cores']} cores ({' '.join(machine['flags'])}), vLLM "
        f"{machine['vllm']}; took {section['seconds']} s.*"
    )


def _servers(runs: Rows) -> Rows:
    """Medians over the pairs, by server and load."""
    rows: list[Row] = []
    if "in_process" in runs[0]:
        for name in dict.fromkeys(run["in_process"] for run in runs):
            for load in ("concurrent", "single"):
                own = [run[load] for run in runs if run["in_process"] == name]
                rows.append({"server": name, "load": load, "rate": statistics.median(own)})
        return rows
    for server, load in dict.fromkeys((run["server"], run["load"]) for run in runs):
        own = [run for run in runs if (run["server"], run["load"]) == (server, load)]
        middle = {
            name: statistics.median(run[name] for run in own)
            for name in ("tokens_per_second", "mean_ttft_milliseconds", "mean_tpot_milliseconds", "share_of_bound")
            if own[0][name] is not None
        }
        rows.append({"server": server, "load": load, "rate": middle["tokens_per_second"]} | middle)
    return rows


def _floor(section: Mapping[str, Any]) -> str:
    (run,) = section["runs"]
    forms = list(run["floors"][0]["forms"])
    columns: dict[str, Callable[[Row], str]] = {"rows": _text("rows")}
    for form in forms:
        columns[f"{form}, ms"] = lambda row, form=form: f"{row['forms'][form]:.1f}"  # type: ignore[misc]
    columns["bound, ms"] = _number("bound_milliseconds", 1)
    columns["engine's step, ms"] = _number("engine_milliseconds", 1)
    columns["bound / step"] = lambda row: f"{row['bound_milliseconds'] / row['engine_milliseconds']:.2f}"
    columns["by PyTorch, ms"] = _number("torch_milliseconds", 1)
    reads = f"{run['read_gigabytes_per_second']:.1f} GB/s, all weights once in {run['read_once_milliseconds']:.1f} ms"
    return f"{table(run['floors'], columns)}\nMemory is read at {reads}.\n\n{_where(section)}\n"


def _number(name: str, digits: int = 0, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: f"{scale * row[name]:.{digits}f}"


def _text(name: str) -> Callable[[Row], str]:
    return lambda row: str(row[name])


def _or_dash(name: str, digits: int = 0) -> Callable[[Row], str]:
    return lambda row: f"{row[name]:.{digits}f}" if name in row else "–"


_MFU = {"MFU, %": _number("mfu", 1, 100)}


def _draw_stall(figure: Figure, rows: Rows) -> None:
    axes = figure.subplots()
    for name in ("sarathi", "vllm"):
        own = [row for row in rows if row["batching"] == name]
        sizes = [row["chunk_tokens"] for row in own]
        axes.plot(sizes, [row["largest_gap_over_usual"] for row in own], "o-", color=COLORS[name], label=name)
    styles = iter(("--", ":", "-."))
    for row in rows:
        if row["chunk_tokens"] is None:
            label = f"{row['batching']}, whole prompts"
            ratio = row["largest_gap_over_usual"]
            axes.axhline(ratio, ls=next(styles), color=COLORS[row["batching"]], label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens in a chunk", ylabel="largest gap / usual gap")
    ticks = sorted({row["chunk_tokens"] for row in rows if row["chunk_tokens"]})
    _plain_ticks(axes, ticks, [1, 2, 5, 10, 20, 50])
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_ablation(figure: Figure, rows: Rows) -> None:
    systems = list(dict.fromkeys(row["system"] for row in rows))
    groups = list(dict.fromkeys(row["lengths"] for row in rows))
    both = figure.subplots(1, 2)
    for axes, name, title in zip(
        both, ("ttft_p50_s", "tbt_p99_s"), ("median TTFT, s", "99th percentile of TBT, s"), strict=True
    ):
        for index, system in enumerate(systems):
            own = {row["lengths"]: row[name] for row in rows if row["system"] == system}
            places = [group + (index - (len(systems) - 1) / 2) * 0.2 for group in range(len(groups))]
            axes.bar(places, [own[g] for g in groups], 0.18, color=SYSTEM_COLORS[index], label=system)
        axes.set_xticks(range(len(groups)), groups)
        axes.set_title(title, fontsize=9)
        axes.grid(axis="x", visible=False)
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(systems), frameon=False)


def _draw_chunks(figure: Figure, rows: Rows) -> None:
    both = figure.subplots(1, 2)
    tiled = [row for row in rows if row["chunk_tokens"] != 257]
    sizes = [row["chunk_tokens"] for row in tiled]
    both[0].plot(sizes, [row["time_over_whole"] for row in tiled], "o-", color=COLORS["sarathi"])
    for row in rows:
        if row not in tiled:
            both[0].plot([257], [row["time_over_whole"]], "x", color=COLORS["vllm"], label="257")
            both[0].legend(frameon=False)
    both[0].set_title("time of the prompt / time of it in one piece", fontsize=9)
    both[1].plot(sizes, [row["kv_bytes_read_again"] / 2**20 for row in tiled], "o-", color=COLORS["vllm"])
    both[1].set_title("KV read again, MiB", fontsize=9)
    for axes in both:
        axes.set(xscale="log", xlabel="tokens in a chunk")
        axes.set_ylim(bottom=0)
        _plain_ticks(axes, sizes, None)


def _draw_static(figure: Figure, rows: Rows) -> None:
    axes = figure.subplots()
    names = [f"{min(row['answer_tokens'])} to {max(row['answer_tokens'])}" for row in rows]
    axes.bar(names, [100 * row["useful_share"] for row in rows], 0.5, color=COLORS["static"], label="counted")
    axes.plot(names, [100 * row["formula"] for row in rows], "D", color=COLORS["vllm"], label="formula")
    axes.set(xlabel="tokens in the shortest and the longest answer of a batch", ylabel="useful share, %")
    axes.grid(axis="x", visible=False)
    axes.legend(frameon=False)


def _plain_ticks(axes: Axes, x: Sequence[int], y: Sequence[int] | None) -> None:
    axes.set_xticks(x, [str(tick) for tick in x])
    axes.minorticks_off()
    if y is not None:
        low, high = axes.get_ylim()
        shown = [tick for tick in y if low <= tick <= high]
        axes.set_yticks(shown, [str(tick) for tick in shown])


PARTS: Mapping[str, tuple[Mapping[str, Callable[[Row], str]], Callable[[Figure, Rows], None]]] = {
    "stall": (
        {
            "strategy": _text("batching"),
            "tokens in a chunk": lambda row: str(row["chunk_tokens"] or "whole prompt"),
            "largest / usual gap": _number("largest_gap_over_usual", 2),
            "usual gap, ms": _number("usual_gap_ms"),
            "largest gap, ms": _number("largest_gap_ms"),
            "spike cut, %": _number("spike_cut_percent"),
            "TTFT of the long prompt, ms": _number("ttft_of_long_ms"),
            **_MFU,
        },
        _draw_stall,
    ),
    "ablation": (
        {
            "lengths": _text("lengths"),
            "system": _text("system"),
            "requests": _text("requests"),
            "requests/s": _number("requests_per_second", 2),
            "median TTFT, s": _number("ttft_p50_s", 2),
            "99th percentile of TBT, s": _number("tbt_p99_s", 3),
            **_MFU,
        },
        _draw_ablation,
    ),
    "chunks": (
        {
            "tokens in a chunk": _text("chunk_tokens"),
            "chunks": _text("chunks"),
            "time / time in one piece": _number("time_over_whole", 2),
            "KV read again, MiB": _number("kv_bytes_read_again", 1, 2**-20),
            **_MFU,
        },
        _draw_chunks,
    ),
    "static": (
        {
            "tokens of the eight answers": lambda row: ", ".join(map(str, row["answer_tokens"])),
            "useful share, %": _number("useful_share", 1, 100),
            "formula, %": _number("formula", 1, 100),
            **_MFU,
        },
        _draw_static,
    ),
}

RATIOS: Mapping[str, Callable[[Row], str]] = {
    "comparison": _text("comparison"),
    "median": _number("median", 2),
    "lowest": _number("lowest", 2),
    "highest": _number("highest", 2),
    "pairs": _text("n"),
}
SERVERS: Mapping[str, Callable[[Row], str]] = {
    "engine": _text("server"),
    "load": _text("load"),
    "tokens/s": _number("rate", 1),
    "mean TTFT, ms": _or_dash("mean_ttft_milliseconds"),
    "mean TPOT, ms": _or_dash("mean_tpot_milliseconds", 1),
    "bound / TPOT": _or_dash("share_of_bound", 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=("strategies", "speed"))
    parser.add_argument("measured", type=Path)
    options = parser.parse_args()
    {"strategies": strategies, "speed": speed}[options.page](json.loads(options.measured.read_text()))


if __name__ == "__main__":
    main()
