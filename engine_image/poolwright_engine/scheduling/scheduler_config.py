"""What the scheduler is told, once: budgets, policies, memory. Every refusal names the field. Options, no decisions."""

from dataclasses import dataclass
from enum import StrEnum

from poolwright_protocol.step_time import StepProfile

GUESSED_SWAP_BYTES_PER_SECOND = 8e9  # half of what a PCIe 4.0 link of 8 lanes carries one way


class Batching(StrEnum):
    """How steps are formed; see `scheduling.batching`."""

    SARATHI = "sarathi"
    VLLM = "vllm"
    ORCA = "orca"
    PREFILL_FIRST = "prefill-first"
    STATIC = "static"

    @property
    def cuts_prompts(self) -> bool:
        return self in (Batching.SARATHI, Batching.VLLM)


class SchedulingPolicy(StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"  # the lowest Request.priority first, then by arrival


class PreemptionMode(StrEnum):
    AUTO = "auto"  # whichever is estimated to cost less
    RECOMPUTE = "recompute"
    SWAP = "swap"  # recompute where host memory is full


class TokenBudget(StrEnum):
    FIXED = "fixed"  # max_num_batched_tokens
    AUTO = "auto"  # at most that; what the running decodes' targets leave time for


class TbtDeadlines(StrEnum):
    CUMULATIVE = "cumulative"  # of token i: the first token + i targets, so tokens that came early leave slack
    EACH = "each"  # one target after the token before


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Tokens and seconds, as the names say.

    `max_num_batched_tokens`: what a step has memory for. `max_num_scheduled_tokens`: fewer, where no step is to be so
    large; None: as many.
    `long_prefill_token_threshold`: most tokens of one prompt in a step, counted after prefix hits; 0: no limit.
    Ignored while one request is all there is.
    `ungranted_share_percent`: the share of the blocks that prompts for other machines may hold while those have not
    granted the memory to send them to; one such prompt always may.
    `watermark`: share of the blocks that an admission leaves free while something runs.
    `max_preemptions`: preempted that often, a request is a victim only where no other is left.
    `swap_bytes_per_second`: between device and host, for the choice between swap and recompute; where nobody measured
    it, a guess.
    `quick_first_tokens`: prompts that wait together share steps of the size that lets them wait least on average, once
    it is known what steps cost; else they fill the budget, which takes the least time for all of them.
    `tbt_target_seconds`, `tbt_deadlines`, `tile_tokens`, `step_profile`: of the auto budget, a multiple of the tile.
    `max_step_seconds`: prompts are cut so that a step with any takes about so long at most, as far as what steps took
    tells; None: max_num_batched_tokens alone bounds it. `prompt_token_seconds`: what is known of that at the start.
    `relegated_seconds`: after that long, who is behind all others has the place that it would have had.
    `static_batch_size` (None: max_num_seqs) and `static_window_seconds`, from the oldest arrival: what closes a batch
    of the static batching.
    `speculative_ngram_tokens`: most tokens guessed for a row from what stood after the same words before; 0: none.
    `model_identity`: part of each cached block's key; equal where KV is.
    """

    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_scheduled_tokens: int | None = None
    max_num_seqs: int = 256
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    batching: Batching = Batching.SARATHI
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    ungranted_share_percent: int = 25
    enable_prefix_caching: bool = True
    model_identity: str = ""
    watermark: float = 0.01
    preemption: PreemptionMode = PreemptionMode.AUTO
    max_preemptions: int = 3
    swap_bytes_per_second: float = GUESSED_SWAP_BYTES_PER_SECOND
    quick_first_tokens: bool = True
    relegated_seconds: float = 120.0
    token_budget: TokenBudget = TokenBudget.FIXED
    tbt_target_seconds: float | None = None
    tbt_deadlines: TbtDeadlines = TbtDeadlines.CUMULATIVE
    tile_tokens: int = 64
    step_profile: StepProfile | None = None
    max_step_seconds: float | None = None
    prompt_token_seconds: float | None = None
    static_batch_size: int | None = None
    static_window_seconds: float = 0.1
    speculative_ngram_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "tile_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("max_num_scheduled_tokens", "static_batch_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in (
            "long_prefill_token_threshold",
            "max_preemptions",
            "static_window_seconds",
            "speculative_ngram_tokens",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), not {self.watermark}")
        if self.swap_bytes_per_second <= 0:
            raise ValueError(f"swap_bytes_per_second must be positive, not {self.swap_bytes_per_second}")
        if self.max_step_seconds is not None and self.max_step_seconds <= 0:
            raise ValueError(f"max_step_seconds must be positive, not {self.max_step_seconds}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs, or a decode would wait")
        if self.max_num_scheduled_tokens is not None and self.max_num_scheduled_tokens < self.max_num_seqs:
            raise ValueError("max_num_scheduled_tokens must be at least max_num_seqs, or a decode would wait")
        if not self.chunked_prefill and self.step_tokens < self.max_model_len:
            raise ValueError("without chunked prefill max_num_batched_tokens must be at least max_model_len")
        if not self.batching.cuts_prompts and self.step_tokens < self.max_model_len:
            raise ValueError(
                f"{self.batching} batching cuts no prompt: max_num_batched_tokens must be at least max_model_len"
            )
        if self.token_budget is TokenBudget.AUTO and (self.tbt_target_seconds is None or self.tbt_target_seconds <= 0):
            raise ValueError("token_budget auto needs a positive tbt_target_seconds")

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step."""
        scheduled = self.max_num_scheduled_tokens
        return self.max_num_batched_tokens if scheduled is None else min(scheduled, self.max_num_batched_tokens)

    @property
    def cuts_prompts(self) -> bool:
        return self.chunked_prefill and self.batching.cuts_prompts

    @property
    def steps_in_flight(self) -> int:
        """How many steps may be submitted and not read. A guess starts from the last token, so that must be known."""
        return 1 if self.speculative_ngram_tokens else 2
