"""What this router has learned of requests by serving them: how long answers are, and how many tokens prompts really
have. Expectations for the next choice; it knows no machine and no price."""

_MEMORY = 64  # requests that a mean is over, about
_FIRST_ANSWER_TOKENS = 128.0  # before any answer has been seen


class Experience:
    def __init__(self) -> None:
        self._answers = 0
        self._answer_tokens = _FIRST_ANSWER_TOKENS
        self._prompts = 0
        self._tokens_per_estimated = 1.0

    def add(self, estimated_prompt_tokens: int, prompt_tokens: int | None, answer_tokens: float | None) -> None:
        """Of one that ended; None: not known."""
        if answer_tokens is not None and answer_tokens > 0:
            self._answers += 1
            self._answer_tokens += (answer_tokens - self._answer_tokens) / min(self._answers, _MEMORY)
        if prompt_tokens is not None and prompt_tokens > 0 and estimated_prompt_tokens > 0:
            self._prompts += 1
            ratio = prompt_tokens / estimated_prompt_tokens
            self._tokens_per_estimated += (ratio - self._tokens_per_estimated) / min(self._prompts, _MEMORY)

    def answer_tokens(self, most: int | None = None) -> float:
        """Expected of the next answer; `most`: what its client allows."""
        return self._answer_tokens if most is None else min(self._answer_tokens, float(max(1, most)))

    def prompt_tokens(self, estimated: int) -> int:
        return max(1, round(estimated * self._tokens_per_estimated))
