"""What work costs on a machine, in seconds of that machine: one price list for routing, admission and the split.

Owns how prompts, chunks and streams are priced from the time of a step; the step's own formula is the protocol's. Knows
no queue and no pool. Where no profile is known there is no price: callers then go by what they measure.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from poolwright_protocol.step_time import StepProfile

# QoServe's margin (ASPLOS 2026): a step is planned to end this much before what it may take.
STEP_MARGIN = 1.2
# What handing the KV over costs a request beside computing its prompt where it decodes: transfer is under computation.
HANDOFF_SECONDS = 0.005


def split_step_seconds(tbt_seconds: float) -> float:
    """The longest step of a token machine at which the second token of a prompt computed elsewhere is in time too: it
    waits for the hand-over, for the step that runs and the one planned behind it, and for its own."""
    return max(0.0, tbt_seconds - HANDOFF_SECONDS) / 3


@dataclass(frozen=True, slots=True)
class MachinePrices:
    """One kind of machine. `step_tokens`: its own budget of a step; `tile_tokens`: chunks are multiples of it.
    `pair_seconds`: attention of one prompt token to one token before it, where that was measured apart: what the square
    of a prompt's length costs. `kv_capacity_tokens`, `kv_bytes_per_token`: None where not known."""

    profile: StepProfile
    step_tokens: int = 2048
    most_streams: int = 256
    tile_tokens: int = 64
    pair_seconds: float = 0.0
    kv_capacity_tokens: int | None = None
    kv_bytes_per_token: int | None = None

    def prefill_seconds(
        self,
        prompt_tokens: float,
        cached_tokens: float = 0.0,
        *,
        step_tokens: int | None = None,
        decodes: float = 0.0,
        kv_tokens: float = 0.0,
    ) -> float:
        """From the first step of a prompt to the end of its last, in chunks of `step_tokens`, each beside `decodes`
        rows with `kv_tokens` of context between them."""
        new = max(0.0, prompt_tokens - cached_tokens)
        pairs = new * cached_tokens + new * new / 2
        return self.queue_seconds(new, pairs, step_tokens=step_tokens, decodes=decodes, kv_tokens=kv_tokens)

    def queue_seconds(
        self,
        tokens: float,
        pairs: float,
        *,
        step_tokens: int | None = None,
        decodes: float = 0.0,
        kv_tokens: float = 0.0,
    ) -> float:
        """Several prompts one after another: `tokens` to compute, `pairs` of each with the tokens before it."""
        if tokens <= 0:
            return 0.0
        chunk = max(1, min(self.step_tokens, step_tokens or self.step_tokens))
        steps = math.ceil(tokens / chunk)
        # The context of a chunk is read once a step: of a prompt within one step that is its length, of a longer one
        # half its length on average.
        read = max(tokens, pairs / chunk + tokens / 2)
        cost = self.profile.mixed
        beside = decodes * cost.token_seconds + kv_tokens * cost.kv_token_seconds
        return (
            steps * (cost.fixed_seconds + beside)
            + tokens * cost.token_seconds
            + read * cost.kv_token_seconds
            + pairs * self.pair_seconds
        )

    def decode_seconds(self, streams: float, kv_tokens: float) -> float:
        return self.profile.decode.seconds(streams, kv_tokens)

    def chunk_within(self, step_seconds: float, streams: float, kv_tokens: float) -> int:
        """The largest multiple of the tile that, beside these streams, makes a step of at most `step_seconds` with the
        margin: at least one tile, so that no prompt ever stands still, at most the machine's own budget."""
        cost = self.profile.mixed
        left = step_seconds / STEP_MARGIN - cost.seconds(streams, kv_tokens)
        each = cost.token_seconds + cost.kv_token_seconds
        if left <= 0:
            return min(self.tile_tokens, self.step_tokens)
        tokens = self.step_tokens if each <= 0 or left / each >= self.step_tokens else int(left / each)
        return min(self.step_tokens, max(self.tile_tokens, tokens - tokens % self.tile_tokens))

    def chunk_at_rate(self, tokens_per_second: float, streams: float, kv_tokens: float) -> int:
        """The smallest multiple of the tile that, beside these streams, computes prompts as fast as this; the machine's
        own budget where none does."""
        cost = self.profile.mixed
        left = 1 - tokens_per_second * (cost.token_seconds + cost.kv_token_seconds)  # of a second, for all else
        if left <= 0:
            return self.step_tokens
        tiles = tokens_per_second * cost.seconds(streams, kv_tokens) / left / self.tile_tokens
        return (
            self.step_tokens
            if tiles * self.tile_tokens >= self.step_tokens
            else max(1, math.ceil(tiles)) * self.tile_tokens
        )

    def streams_within(self, step_seconds: float, context_tokens: float) -> float:
        """How many streams of this context keep their step at most this long, as far as KV memory holds them; 0 where
        not even one does."""
        cost = self.profile.decode
        each = cost.token_seconds + cost.kv_token_seconds * context_tokens
        if cost.fixed_seconds + each > step_seconds:
            return 0.0
        streams = (step_seconds - cost.fixed_seconds) / each if each > 0 else math.inf
        if self.kv_capacity_tokens is not None and context_tokens > 0:
            streams = min(streams, self.kv_capacity_tokens / context_tokens)
        return min(streams, float(self.most_streams))

    def prompt_token_seconds(self, mean_prompt_tokens: float) -> float:
        """Of a machine that computes nothing but prompts, always in full steps: its price of a prompt token, with
        lengths that vary as an exponential's do (the traces of Azure and Mooncake have that spread, or nearly)."""
        n = max(1.0, mean_prompt_tokens)
        cost, pairs_each = self.profile.mixed, n  # E[n²] / (2 E[n]), with E[n²] = 2 E[n]²
        read_each = max(1.0, pairs_each / self.step_tokens + 0.5)
        return (
            cost.fixed_seconds / self.step_tokens
            + cost.token_seconds
            + read_each * cost.kv_token_seconds
            + pairs_each * self.pair_seconds
        )


Prices = Mapping[str, MachinePrices]  # by machine class
