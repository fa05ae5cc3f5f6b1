"""What an offline run came to: requests, tokens, seconds, and what they cost at a price that somebody gives.

Pure. It knows no price of its own: none would be true for long.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Throughput:
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, prompt_tokens: int, completion_tokens: int, failed: bool = False) -> None:
        self.requests += 1
        self.failed += failed
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens

    def rates(self, seconds: float) -> str:
        per = max(seconds, 1e-9)
        return f"prompt {self.prompt_tokens / per:,.0f} tokens/s, output {self.completion_tokens / per:,.0f} tokens/s"

    def report(self, seconds: float, cost_per_hour: float | None = None) -> list[str]:
        """Lines for a person. What was paid is the whole time, loading left out."""
        lines = [
            f"requests            {self.requests}, {self.failed} of them failed",
            f"tokens              {self.prompt_tokens} of prompts, {self.completion_tokens} of output",
            f"time                {seconds:.1f} s",
            f"throughput          {self.rates(seconds)}",
        ]
        if cost_per_hour is not None:
            dollars = cost_per_hour * seconds / 3600
            total = self.prompt_tokens + self.completion_tokens
            lines.append(f"cost                ${dollars:.6f} at ${cost_per_hour:g} an hour")
            if total and dollars > 0:
                lines.append(
                    f"tokens per dollar   {total / dollars:,.0f} (prompt and output), "
                    f"{self.completion_tokens / dollars:,.0f} (output)"
                )
                lines.append(
                    f"$ per million       {dollars / total * 1e6:.4f} (prompt and output)" + self._of_output(dollars)
                )
        return lines

    def _of_output(self, dollars: float) -> str:
        return f", {dollars / self.completion_tokens * 1e6:.4f} (output)" if self.completion_tokens else ""
