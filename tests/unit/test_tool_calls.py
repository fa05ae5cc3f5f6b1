"""Tool calls are found in text however it is cut, given once, and what is no call is said."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolwright_engine.text.tool_calls import CallForm, CallPart, ToolCalls, form_of, takes_tools

WEATHER = '{"name": "weather", "arguments": {"city": "Paris, \\"FR\\"", "days": [1, {"a": "}"}]}}'
TIME = '{"arguments": {}, "name": "time"}'


def read(form: CallForm, pieces: list[str], named: str = "") -> tuple[str, list[tuple[str, str]], ToolCalls]:
    """What is said, and each call's name and arguments; a call's name comes once, with its first part."""
    parser = ToolCalls(form, named)
    said, calls = "", list[tuple[str, str]]()
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.flush():
        if isinstance(part, str):
            said += part
            continue
        assert isinstance(part, CallPart)
        if part.index == len(calls):
            assert part.name
            calls.append((part.name, ""))
        else:
            assert part.name is None
            assert part.index == len(calls) - 1
        calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return said, calls, parser


TEXTS: list[tuple[CallForm, str, str, list[tuple[str, Any]]]] = [
    (CallForm.TAGGED, "just words <tool", "just words <tool", []),
    (CallForm.TAGGED, f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("weather", json.loads(WEATHER)["arguments"])]),
    (
        CallForm.TAGGED,
        f"I look.\n<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{TIME}\n</tool_call>\n",
        "I look.\n",
        [("weather", json.loads(WEATHER)["arguments"]), ("time", {})],
    ),
    (CallForm.TAGGED, '<tool_call>{"name": "f"}</tool_call> then', "then", [("f", {})]),
    (CallForm.TAGGED, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    (CallForm.TAGGED, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    (CallForm.BARE, '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    (CallForm.BARE, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}', "", [("f", {}), ("g", {})]),
    (CallForm.BARE, "The answer is {}", "The answer is {}", []),
    (CallForm.BARE, '{"answer": 42} and more', '{"answer": 42} and more', []),
    (
        CallForm.LIST,
        '[{"name": "f", "parameters": {"a": "]"}}, {"name": "g", "parameters": {}}]',
        "",
        [("f", {"a": "]"}), ("g", {})],
    ),
    (CallForm.NAMED, '{"a": {"b": 1}}', "", [("mine", {"a": {"b": 1}})]),
]


@pytest.mark.parametrize(("form", "text", "said", "calls"), TEXTS)
def test_calls_and_words_are_told_apart_however_the_text_is_cut(
    form: CallForm, text: str, said: str, calls: list[tuple[str, Any]]
) -> None:
    for width in (1, 2, 3, 7, len(text)):
        found = read(form, [text[at : at + width] for at in range(0, len(text), width)], "mine")
        assert found[0] == said, width
        assert [(name, json.loads(arguments)) for name, arguments in found[1]] == calls, width


def test_arguments_cut_off_are_given_as_far_as_they_go() -> None:
    said, calls, parser = read(CallForm.TAGGED, ['<tool_call>{"name": "f", "arguments": {"city": "Par'])
    assert (said, calls, parser.count) == ("", [("f", '{"city": "Par')], 1)


def test_a_call_cut_off_before_its_name_is_said() -> None:
    assert read(CallForm.TAGGED, ['<tool_call>{"na'])[:2] == ('<tool_call>{"na', [])


@given(text=st.text(alphabet='{}[]":,\\ \n<>/_acelmnot', max_size=60), data=st.data())
def test_no_text_breaks_it_and_cuts_change_nothing(text: str, data: st.DataObject) -> None:
    for form in CallForm:
        whole = read(form, [text], "mine")
        at = data.draw(st.integers(0, len(text)))
        assert read(form, [text[:at], text[at:]], "mine")[:2] == whole[:2]


@pytest.mark.parametrize(
    ("template", "form", "takes"),
    [
        (None, None, False),
        ("{{ messages }}", None, False),
        ("{% if tools %}<tool_call>{% endif %}", CallForm.TAGGED, True),
        ('{% if tools is not none %}ipython {"name": x, "parameters": y}{% endif %}', CallForm.BARE, True),
        ("{{ tools }}[TOOL_CALLS]", None, True),
    ],
)
def test_the_form_is_read_from_the_chat_template(template: str | None, form: CallForm | None, takes: bool) -> None:
    assert form_of(template) is form
    assert takes_tools(template) is takes
