"""What the loop and the hand-off report as it happens. `api.metrics` overrides what it exports; the base ignores all.

Called on the loop's thread (hand-off: on the event loop), once per event, so each method must be quick and thread-safe.
"""

from poolwright_engine.scheduling.sequence import FinishReason


class Observer:
    def request_scheduled(self, queue_seconds: float) -> None:
        """Arrival to the first step that computes the request here, or to its hand-off's first token."""

    def first_token(self, ttft_seconds: float, prefill_seconds: float) -> None:
        """`prefill_seconds`: first scheduled to first token."""

    def inter_token(self, seconds: float) -> None:
        """Gap between two tokens of one request, as the loop saw them."""

    def step(self, num_tokens: int, num_prefill_tokens: int, busy_seconds: float) -> None:
        """One step was read. Both counts are tokens computed in it."""

    def prompt_tokens(self, count: int, transferred: bool, cached: int = 0) -> None:
        """At the first token. `transferred`: their KV is computed on another machine. `cached`: how many of them were
        found in the prefix cache."""

    def generation_tokens(self, count: int) -> None: ...

    def prefix_lookup(self, queried_tokens: int, hit_tokens: int) -> None:
        """When a request is first admitted; what it finds again after a preemption is no hit."""

    def preempted(self, swapped: bool) -> None:
        """A request lost its memory to another; `swapped`: its KV went to host memory."""

    def swapped(self, num_blocks: int, out: bool) -> None:
        """KV blocks were copied to host memory (`out`), or back."""

    def padded(self, num_tokens: int) -> None:
        """What a server that pads its batches would have computed beside a step's tokens."""

    def request_preemptions(self, count: int) -> None:
        """Once per request of a client, when it ends."""

    def finished(
        self,
        reason: FinishReason,
        prompt_tokens: int,
        generation_tokens: int,
        max_tokens: int,
        e2e_seconds: float,
        inference_seconds: float,
        decode_seconds: float,
    ) -> None:
        """Once per request of a client. `inference`: first scheduled to end; `decode`: first token to end."""

    def refused(self, reason: str) -> None:
        """`too_long`, `invalid`, `queue_full`, `draining` or `dead`: few, fixed words."""

    def prefill_served(self, prompt_tokens: int) -> None:
        """This machine computed a prompt for another one and sent its first token."""

    def kv_sent(self, num_bytes: int, seconds: float) -> None:
        """A push ended and the receiver confirmed it."""

    def kv_received(self, num_bytes: int, seconds: float) -> None:
        """A manifest was complete; `seconds` since the first byte of the push."""

    def kv_failed(self, side: str, reason: str) -> None:
        """`side` is `send` or `receive`. `reason` is one of handoff.FailureReason: few, fixed words."""
