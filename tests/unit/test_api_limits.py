"""The limits that the reference names are those of the code."""

import re
from pathlib import Path

from poolwright_engine.api import openai_api, sampling_options, server

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "engine-api.md"


def test_the_reference_names_the_limits() -> None:
    section = REFERENCE.read_text().split("## Limits")[1].split("##")[0]
    rows = re.findall(r"^\| (.+?) \| (\d+)", section, re.MULTILINE)
    found = {name.replace("`", ""): int(most) for name, most in rows}
    assert found == {
        "body": server.MAX_BODY_BYTES // 2**20,
        "prompts of one request": openai_api.MAX_PROMPTS,
        "n, best_of": openai_api.MAX_CHOICES,
        "prompts times choices": openai_api.MAX_SEQUENCES,
        "stop strings": openai_api.MAX_STOP_STRINGS,
        "logprobs, top_logprobs, prompt_logprobs": sampling_options.MAX_LOGPROBS,
        "tools": openai_api.MAX_TOOLS,
        "depth of a JSON schema": sampling_options.MAX_SCHEMA_DEPTH,
        "X-Request-Id": 256,
    }
