"""What a split moves over the network: KV bytes of a token, a request and a second, and the share of links they take.

Attention with one K and one V vector for each KV head (MHA, GQA, MQA); latent attention (MLA) stores something else and
is not meant. Knows no queues: a share says whether a link can carry the mean, not how long a burst waits for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from poolwright.sim.profiles import BLOOM_176B, LLAMA_8B, LLAMA_70B, OPT_13B, OPT_66B
from poolwright_protocol.kv import KVShape

GIB = 1 << 30
GB = 10**9


@dataclass(frozen=True, slots=True)
class ModelKV:
    """`heads`: query heads, which tell MHA from GQA."""

    name: str
    shape: KVShape
    heads: int

    @property
    def attention(self) -> str:
        if self.shape.kv_heads == self.heads:
            return "MHA"
        return "MQA" if self.shape.kv_heads == 1 else "GQA"


MODELS = {
    model.name: model
    for model in (
        ModelKV("opt-13b", OPT_13B, heads=40),
        ModelKV("opt-66b", OPT_66B, heads=72),
        ModelKV("llama-8b", LLAMA_8B, heads=32),
        ModelKV("llama-70b", LLAMA_70B, heads=64),
        ModelKV("bloom-176b", BLOOM_176B, heads=112),
    )
}


@dataclass(frozen=True, slots=True)
class LinkKind:
    name: str
    bytes_per_second: float

    @property
    def gbps(self) -> float:
        return self.bytes_per_second * 8 / 1e9


def network_link(gbps: float, name: str | None = None) -> LinkKind:
    return LinkKind(name or f"{gbps:g} Gbps", gbps * 1e9 / 8)


# The three placements of DistServe (OSDI 2024, sections 3.3, 4.2 and 6.1). NVIDIA's 600 GB/s of an A100 count both
# directions; KV goes one way.
PLACEMENTS = (
    network_link(25, "across nodes, 25 Gbps"),
    network_link(800, "across nodes, 800 Gbps InfiniBand"),
    LinkKind("within a node, NVLink 600 GB/s", 600e9),
    LinkKind("within a node, NVLink one way, 300 GB/s", 300e9),
)


@dataclass(frozen=True, slots=True)
class Passage:
    """`share` of the link by the mean rate, above 1 where it cannot carry it; `seconds` of one request alone on it."""

    link: LinkKind
    share: float
    seconds: float


@dataclass(frozen=True, slots=True)
class KVLedger:
    """`links`: how many carry the rate side by side, one for each prompt machine or each token machine, whichever are
    fewer. `kv_tokens`: of one request."""

    name: str
    bytes_per_token: int
    kv_tokens: float
    requests_per_second: float
    links: int = 1

    def __post_init__(self) -> None:
        if self.links < 1 or self.bytes_per_token <= 0 or self.kv_tokens < 0 or self.requests_per_second < 0:
            raise ValueError("a ledger needs a link, bytes for a token, and no negative tokens or rates")

    @property
    def request_bytes(self) -> float:
        return self.bytes_per_token * self.kv_tokens

    @property
    def bytes_per_second(self) -> float:
        return self.request_bytes * self.requests_per_second

    @property
    def gbps(self) -> float:
        return self.bytes_per_second * 8 / 1e9

    def over(self, link: LinkKind) -> Passage:
        rate = self.bytes_per_second / self.links
        return Passage(link, rate / link.bytes_per_second, self.request_bytes / link.bytes_per_second)


def ledger_of(model: ModelKV, prompt_tokens: float, requests_per_second: float, links: int = 1) -> KVLedger:
    return KVLedger(model.name, model.shape.bytes_per_token, prompt_tokens, requests_per_second, links)


def lines(ledger: KVLedger, placements: Sequence[LinkKind] = PLACEMENTS, model: ModelKV | None = None) -> list[str]:
    """The ledger as text, one entry a line."""
    said = [f"KV ledger of {ledger.name}"]
    if model is not None:
        shape = model.shape
        said.append(
            f"  a token: 2 (K and V) x {shape.layers} layers x {shape.kv_heads} KV heads x {shape.head_size} x "
            f"{shape.dtype_bytes} bytes = {shape.bytes_per_token:,} bytes ({model.attention}"
            + (f", {model.heads // shape.kv_heads} times less than with all {model.heads} heads" * (_shared(model)))
            + ")"
        )
    else:
        said.append(f"  a token: {ledger.bytes_per_token:,} bytes")
    size = ledger.request_bytes
    said.append(f"  a request: {ledger.kv_tokens:,.0f} tokens = {size / GIB:.3f} GiB = {size / GB:.3f} GB")
    said.append(
        f"  a second: {ledger.requests_per_second:g} requests = {ledger.bytes_per_second / GB:.2f} GB/s = "
        f"{ledger.gbps:.1f} Gbps" + (f" over {ledger.links} links" if ledger.links > 1 else "")
    )
    for link in placements:
        passage = ledger.over(link)
        verdict = "" if passage.share <= 1 else ": more than it carries"
        said.append(f"  {link.name}: {passage.share:.1%} of it, {passage.seconds * 1e3:.1f} ms a request{verdict}")
    return said


def _shared(model: ModelKV) -> bool:
    return model.shape.kv_heads < model.heads


def distserve_ledger() -> list[str]:
    """DistServe's example (section 3.3) as its own numbers make it, and what the paper says instead."""
    model = MODELS["opt-66b"]
    ledger = ledger_of(model, 512, 10.0)
    as_printed = round(ledger.request_bytes / GIB + 0.0005, 2)  # 1.125 GiB, rounded up
    return [
        *lines(ledger, model=model),
        f"  DistServe prints {as_printed:.2f} GB and 90 Gbps: these are GiB read as GB "
        f"({as_printed:.2f} x 10 x 8 = {as_printed * 80:.1f}); in GB it is {ledger.request_bytes / GB:.3f} and "
        f"{ledger.gbps:.1f} Gbps, {ledger.bytes_per_second * 8 / 1e9 / 90 - 1:.0%} more",
    ]
