"""Events cut and read, bodies put together, prompts estimated: whatever the bytes."""

import itertools
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolwright.router import events, inference
from poolwright.router.assemble import Assembly
from poolwright.router.errors import RequestError
from poolwright.router.events import Kind, Splitter
from poolwright.router.metrics import Histogram, PromptTokens
from poolwright_protocol.buckets import LATENCY_BUCKETS_SECONDS

USAGE = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}


def line(fields: dict[str, Any], **how: Any) -> bytes:
    return b"data: " + json.dumps(fields, **{"separators": (",", ":"), **how}).encode()


@given(st.lists(st.binary(max_size=20).filter(lambda b: b"\n" not in b)), st.lists(st.integers(0, 200)))
def test_events_come_out_whole_however_the_bytes_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(body + b"\n\n" for body in bodies)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    splitter = Splitter()
    out = [e for start, stop in itertools.pairwise(edges) for e in splitter.feed(stream[start:stop])]
    assert out == bodies


@given(st.text(), st.booleans(), st.booleans(), st.booleans())
def test_an_event_without_its_usage_is_the_same_event_otherwise(
    text: str, spaced: bool, ascii_only: bool, usage_last: bool
) -> None:
    fields: dict[str, Any] = {"id": "x", "choices": [{"index": 0, "text": text}]}
    full = {**fields, "usage": USAGE} if usage_last else {"usage": USAGE, **fields}
    separators = (", ", ": ") if spaced else (",", ":")
    raw = b"data: " + json.dumps(full, separators=separators, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    for whole in (False, True):
        event = events.read(raw, whole)
        assert event.kind is Kind.TOKENS
        assert event.usage == USAGE
        assert json.loads(event.bare.removeprefix(b"data: ").decode(errors="surrogatepass")) == fields


def test_a_usage_inside_a_choice_is_not_the_events() -> None:
    fields = {"choices": [{"index": 0, "text": "a", "usage": {"completion_tokens": 9}}]}
    event = events.read(line(fields), whole=False)
    assert event.usage is None
    assert event.raw == event.bare


@pytest.mark.parametrize("whole", [True, False])
def test_events_are_told_apart(whole: bool) -> None:
    def kind(raw: bytes) -> Kind:
        return events.read(raw, whole).kind

    assert kind(line({"choices": [{"index": 0}]})) is Kind.TOKENS
    assert kind(line({"choices": [], "usage": USAGE})) is Kind.USAGE
    assert kind(line({"choices": [], "usage": USAGE, "system_fingerprint": "x"})) is Kind.USAGE
    assert kind(line({"error": {"message": "no"}})) is Kind.ERROR
    assert kind(b"data: [DONE]") is Kind.DONE
    assert kind(b": ping") is Kind.OTHER
    with pytest.raises(ValueError, match="JSON"):
        events.read(b"data: [1]", whole)


def test_the_index_of_a_choice_is_read_where_there_are_several() -> None:
    assert events.read(line({"choices": [{"index": 3}], "usage": USAGE}), whole=True).choice == 3


def test_log_probabilities_stop_reasons_and_token_ids_are_put_together() -> None:
    assembly = Assembly()
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    for index, token in ((0, "a"), (1, "x"), (0, "b")):
        assembly.add(
            {
                **head,
                "choices": [
                    {
                        "index": index,
                        "text": token,
                        "logprobs": {"text_offset": [0], "tokens": [token], "top_logprobs": [{token: -0.5}]},
                        "finish_reason": "stop" if token == "b" else None,
                        "stop_reason": "b" if token == "b" else None,
                        "token_ids": [ord(token)],
                    }
                ],
                "usage": USAGE,
            }
        )
    assembly.add({**head, "choices": [], "usage": USAGE, "system_fingerprint": "f"})
    body = json.loads(assembly.body())
    first, second = body["choices"]
    assert (first["text"], first["finish_reason"], first["stop_reason"], first["token_ids"]) == (
        "ab",
        "stop",
        "b",
        [97, 98],
    )
    assert first["logprobs"] == {
        "text_offset": [0, 0],
        "tokens": ["a", "b"],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}],
    }
    assert (second["text"], second["stop_reason"]) == ("x", None)
    assert body["usage"] == {**USAGE, "prompt_tokens_details": None, "completion_tokens_details": None}
    assert (body["object"], body["system_fingerprint"]) == ("text_completion", "f")


def test_the_parts_of_tool_calls_are_put_together_by_their_index() -> None:
    def delta(**fields: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": fields, "finish_reason": None}
        return {"object": "chat.completion.chunk", "choices": [choice]}

    def part(index: int, arguments: str, **more: Any) -> dict[str, Any]:
        name = {"name": more.pop("name")} if "name" in more else {}
        return {"index": index, **more, "function": {**name, "arguments": arguments}}

    assembly = Assembly()
    for fields in (
        {"role": "assistant", "content": ""},
        {"tool_calls": [part(0, "", id="a", type="function", name="f")]},
        {"tool_calls": [part(0, '{"x"'), part(0, ": 1}")]},
        {},
        {"tool_calls": [part(1, "{}", id="b", type="function", name="g")]},
    ):
        assembly.add(delta(**fields))
    (choice,) = json.loads(assembly.body())["choices"]
    assert choice["message"]["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert choice["message"]["content"] is None


@pytest.mark.parametrize(
    ("fields", "tokens", "choices"),
    [
        ({"prompt": "x" * 40}, 10, 1),
        ({"prompt": "é" * 40}, 20, 1),
        ({"prompt": [1, 2, 3]}, 3, 1),
        ({"prompt": [[1, 2], [3]]}, 3, 2),
        ({"prompt": ["aaaa", "bbbbb"]}, 3, 2),
        ({"prompt": "a", "n": 3}, 1, 3),
        ({"prompt": None}, 0, 1),
        ({"prompt": {"a": 1}}, 0, 1),
        ({"messages": [{"role": "user", "content": "x" * 8}, {"role": "user", "content": None}]}, 2, 1),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 8}]}]}, 2, 1),
        ({"messages": "none"}, 0, 1),
        ({}, 0, 1),
    ],
)
def test_prompts_are_estimated_from_ids_and_bytes(fields: dict[str, Any], tokens: int, choices: int) -> None:
    request = inference.parse(json.dumps(fields).encode())
    assert (request.prompt_tokens, request.choices) == (tokens, choices)


@given(st.binary(max_size=60))
def test_no_bytes_make_the_parser_fail_in_another_way_than_a_400(raw: bytes) -> None:
    with suppress(RequestError):
        inference.parse(raw)


def test_corrected_prompt_tokens_never_fall_and_add_up() -> None:
    tokens = PromptTokens()
    seen = []
    for estimate, actual in ((100, 60), (50, 80), (10, 10), (100, 1), (200, 200), (0, 99)):
        tokens.estimated(estimate)
        seen.append(tokens.total)
        tokens.corrected(estimate, actual)
        seen.append(tokens.total)
    assert seen == sorted(seen)
    assert tokens.total == 60 + 80 + 10 + 1 + 200 + 99


def test_a_latency_on_a_bound_counts_in_that_bucket_as_prometheus_has_it() -> None:
    histogram = Histogram()
    for seconds in (0.0, LATENCY_BUCKETS_SECONDS[0], LATENCY_BUCKETS_SECONDS[-1], 1000.0):
        histogram.observe(seconds)
    rows = histogram.cumulative()
    assert rows[0] == ("0.001", 2)
    assert rows[-2][1] == 3
    assert rows[-1] == ("+Inf", 4)
