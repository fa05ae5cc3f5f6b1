"""Write bench/data/ from the public originals: smaller, compressed, with nothing else changed.

    python scripts/bench_data.py FOLDER     # holds the originals, anywhere below it, under their public names

Where each comes from, and under which licence, stands in bench/data/README.md. The same originals give the same bytes.
"""

import argparse
import csv
import io
import json
import lzma
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "bench" / "data"
MOST_BYTES = 2_000_000
AZURE = {"code": "azure_code", "conv": "azure_conversation"}
VERBATIM = {
    "derived_iteration_times_ms.csv": "iteration_times_ms.csv.xz",
    "splitwise-sim_perf_model.csv": "splitwise_sim_perf_model.csv.xz",
    "profiler-a100-80g.distserve.json": "distserve_a100_80g.json",
    "max_num_tokens.csv": "distserve_max_num_tokens.csv",
    "sarathi_fig14_chunking_overhead.csv": "sarathi_fig14_chunking_overhead.csv",
    "sarathi_hybrid_batch_1024.csv": "sarathi_hybrid_batch_1024.csv",
    "sarathi_yi34b_decode_iteration.csv": "sarathi_yi34b_decode_iteration.csv",
    "sarathi_yi34b_prefill_iteration.csv": "sarathi_yi34b_prefill_iteration.csv",
}
SEND_RECV = ("a100_dgx", "h100_dgx", "a100_pairwise_nvlink", "h100_pairwise_nvlink")
SEND_RECV_SIZES = 24


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    TARGET.mkdir(parents=True, exist_ok=True)
    for kind, name in AZURE.items():
        write(f"{name}.csv.xz", azure(original(folder, f"AzureLLMInferenceTrace_{kind}.csv")))
    write("mooncake_conversation.csv.xz", mooncake(original(folder, "conversation_trace.jsonl")))
    arxiv = original(folder, "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv")
    write("arxiv_lengths.csv.xz", arxiv_lengths(arxiv))
    for source, name in VERBATIM.items():
        write(name, original(folder, source).read_bytes())
    write("vidur_send_recv.csv", send_recv(folder))
    return 0


def original(folder: Path, name: str) -> Path:
    found = sorted(folder.rglob(name))
    if not found:
        sys.exit(f"{folder} holds no {name}")
    return found[0]


def write(name: str, content: bytes) -> None:
    data = lzma.compress(content, preset=9 | lzma.PRESET_EXTREME) if name.endswith(".xz") else content
    if len(data) > MOST_BYTES:
        sys.exit(f"{name} would have {len(data)} bytes, more than {MOST_BYTES}")
    (TARGET / name).write_bytes(data)
    print(f"{name:42} {len(data):9,} bytes")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue().encode()


def azure(path: Path) -> bytes:
    """Times to the microsecond, from the first arrival."""

    def microseconds(stamp: str) -> int:
        whole, _, fraction = stamp.partition(".")
        seconds = datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp()
        return int(seconds) * 1_000_000 + int(fraction[:6].ljust(6, "0"))

    with path.open(encoding="utf-8", newline="") as file:
        rows = [
            (microseconds(row["TIMESTAMP"]), row["ContextTokens"], row["GeneratedTokens"])
            for row in csv.DictReader(file)
        ]
    first = min(at for at, *_ in rows)
    return table(("arrival_us", "prompt_tokens", "output_tokens"), ((at - first, *rest) for at, *rest in rows))


def mooncake(path: Path) -> bytes:
    """Block hashes are renumbered by first appearance and written as ranges: `0 1-13`."""
    numbers: dict[int, int] = {}
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        blocks = [numbers.setdefault(block, len(numbers)) for block in row["hash_ids"]]
        rows.append((row["timestamp"], row["input_length"], row["output_length"], ranges(blocks)))
    return table(("arrival_ms", "prompt_tokens", "output_tokens", "blocks_of_512"), rows)


def ranges(numbers: Sequence[int]) -> str:
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return " ".join(f"{first}-{last}" if last > first else str(first) for first, last in found)


def arxiv_lengths(path: Path) -> bytes:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [(row["num_prefill_tokens"], row["num_decode_tokens"]) for row in csv.DictReader(file)]
    return table(("prompt_tokens", "output_tokens"), rows)


def send_recv(folder: Path) -> bytes:
    """Some sizes of each, evenly spread over the ranks of the measured ones: medians, in ms."""
    rows = []
    for name in SEND_RECV:
        with original(folder, f"send_recv_{name}.csv").open(encoding="utf-8", newline="") as file:
            measured = list(csv.DictReader(file))
        for devices in ("1", "2"):
            points = sorted(
                (int(row["size"]), float(row["time_stats.send_recv.median"]))
                for row in measured
                if row["devices_per_node"] == devices
            )
            step = max(1, len(points) // SEND_RECV_SIZES)
            place = "across nodes" if devices == "1" else "in a node"
            rows += [(name, place, size, f"{median:.4g}") for size, median in points[::step]]
    return table(("machine", "place", "bytes", "median_ms"), rows)


if __name__ == "__main__":
    sys.exit(main())
