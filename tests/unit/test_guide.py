"""A guide lets through the texts it describes and no others, and what cannot be followed is refused in words."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers

from poolwright_engine.sampling.guide import MAX_GUIDE_CHARS, GuideError, Guides, GuideState
from poolwright_engine.scheduling.sequence import Guide, GuideKind
from poolwright_engine.text.tokenizer import Tokenizer
from support.tiny_llama import CONFIG, write_byte_tokenizer

VOCAB_SIZE = CONFIG["vocab_size"]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Guides:
    return Guides(tokenizer, VOCAB_SIZE)


def texts(kind: GuideKind, text: str) -> Guide:
    return Guide(kind, text)


def follows(guides: Guides, tokenizer: Tokenizer, guide: Guide, text: str) -> bool:
    """The text, then the end, are allowed token by token."""
    state = guides.start(guide)
    for token_id in (*tokenizer.encode(text), min(tokenizer.eos_ids)):
        if not state.allowed()[token_id]:
            return False
        state.advance((token_id,))
    return True


@pytest.mark.parametrize(
    ("guide", "good", "bad"),
    [
        (
            texts(GuideKind.JSON_SCHEMA, SCHEMA),
            ['{"name":"Ann","age":3}', '{ "name": "é", "age": -12 }'],
            [
                "",
                "{}",
                '{"name":"Ann"}',
                '{"name":"Annabel","age":3}',
                '{"name":"Ann","age":3.5}',
                '{"name":"A","age":3} ',
            ],
        ),
        (
            texts(GuideKind.JSON_OBJECT, ""),
            ["{}", '{"a": [1, {"b": null}]}'],
            ["[1]", "1", '{"a"}', "{'a': 1}", '{"a": 1'],
        ),
        (texts(GuideKind.REGEX, r"[a-f]{2}-\d+"), ["ab-1", "fe-2024"], ["ab-", "abc-1", "ag-1", "ab-1x"]),
        (
            texts(GuideKind.CHOICE, json.dumps(["yes", "no", 'a "b"\n\\', "née", "<|end|>"])),
            ["yes", "no", 'a "b"\n\\', "née"],
            ["", "y", "maybe", "yes "],
        ),
        (texts(GuideKind.GRAMMAR, 'start: "a"+ end\nend: /[xy]/'), ["ax", "aaay"], ["a", "x", "axy"]),
        (texts(GuideKind.GRAMMAR, 'root ::= "a" tail\ntail ::= [0-9] | "-"'), ["a1", "a-"], ["a", "b1"]),
    ],
)
def test_a_guide_lets_its_texts_through_and_no_other(
    guides: Guides, tokenizer: Tokenizer, guide: Guide, good: list[str], bad: list[str]
) -> None:
    assert guides.check(guide) is None
    assert [text for text in good if not follows(guides, tokenizer, guide, text)] == []
    assert [text for text in bad if follows(guides, tokenizer, guide, text)] == []


@pytest.mark.parametrize(
    ("guide", "says"),
    [
        (texts(GuideKind.JSON_SCHEMA, "{"), "not JSON: Expecting"),
        (texts(GuideKind.JSON_SCHEMA, '{}, "lark_grammar": "start: /a/"'), "not JSON: Extra data"),
        (texts(GuideKind.JSON_SCHEMA, '{"type": "wrong"}'), "Invalid type: wrong"),
        (texts(GuideKind.JSON_SCHEMA, '{"$ref": "#/nowhere"}'), "'/nowhere' does not exist"),
        (texts(GuideKind.JSON_SCHEMA, '{"not": {"type": "string"}}'), 'Unimplemented keys: ["not"]'),
        (texts(GuideKind.JSON_SCHEMA, "false"), "Unsatisfiable"),
        (texts(GuideKind.REGEX, "(a"), "unclosed group"),
        (texts(GuideKind.REGEX, "a(?=b)"), "look-around"),
        (texts(GuideKind.CHOICE, "[]"), "one or more strings"),
        (texts(GuideKind.CHOICE, '["a", 1]'), "one or more strings"),
        (texts(GuideKind.CHOICE, "yes"), "not JSON: Expecting value"),
        (texts(GuideKind.GRAMMAR, "start: nowhere"), 'unknown name: "nowhere"'),
        (texts(GuideKind.GRAMMAR, ""), "."),
        (texts(GuideKind.REGEX, "a" * (MAX_GUIDE_CHARS + 1)), "characters, more than"),
        (texts(GuideKind.JSON_SCHEMA, '{"a":' * 5000), "."),
    ],
)
def test_a_guide_that_cannot_be_followed_is_refused_in_one_line(guides: Guides, guide: Guide, says: str) -> None:
    error = guides.check(guide)
    assert error is not None
    assert says in error or says == "."
    assert "\n" not in error
    assert len(error) < 500
    with pytest.raises(GuideError):
        guides.start(guide)


def only(state: GuideState) -> list[int]:
    return np.flatnonzero(state.allowed()).tolist()


def test_after_its_end_a_text_can_only_end(guides: Guides, tokenizer: Tokenizer) -> None:
    state = guides.start(texts(GuideKind.CHOICE, '["yes"]'), tokenizer.encode("yes"))
    (end,) = tokenizer.eos_ids
    assert only(state) == [end]
    for token_id in (end, end, 5):  # a step ahead still samples, and one that ignores the end goes on
        state.advance((token_id,))
        assert only(state) == [end]


def test_a_state_after_tokens_is_the_one_that_took_them(guides: Guides, tokenizer: Tokenizer) -> None:
    guide = texts(GuideKind.JSON_SCHEMA, SCHEMA)
    output = tokenizer.encode('{"name": "Bob", "age": 4')
    stepped = guides.start(guide)
    for count in range(len(output) + 1):
        assert only(guides.start(guide, output[:count])) == only(stepped)
        stepped.advance(output[count : count + 1])


def test_states_of_one_guide_are_apart(guides: Guides, tokenizer: Tokenizer) -> None:
    guide = texts(GuideKind.CHOICE, '["ab", "cd"]')
    first, second = guides.start(guide), guides.start(guide)
    first.advance(tokenizer.encode("a"))
    assert only(first) == tokenizer.encode("b")
    assert only(second) == sorted(tokenizer.encode("a") + tokenizer.encode("c"))


def test_a_token_outside_the_guide_is_an_error_that_stays(guides: Guides, tokenizer: Tokenizer) -> None:
    state = guides.start(texts(GuideKind.REGEX, "a+"))
    for _ in range(2):
        with pytest.raises(GuideError, match="left its guide"):
            state.advance(tokenizer.encode("b"))
        with pytest.raises(GuideError, match="left its guide"):
            state.allowed()


def test_ids_beyond_the_tokenizer_are_never_allowed(guides: Guides, tokenizer: Tokenizer) -> None:
    allowed = guides.start(texts(GuideKind.REGEX, r"(?s:.*)")).allowed()
    assert allowed.shape == (VOCAB_SIZE,)
    assert allowed[: tokenizer.vocab_size].sum() > 128  # what may begin a character
    assert not allowed[tokenizer.vocab_size :].any()


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poolwright_engine.sampling import guide as module

    compiled: list[str] = []

    def counted(guide: Guide) -> Any:
        compiled.append(guide.text)
        return plain(guide)

    plain = module._grammar
    monkeypatch.setattr(module, "_grammar", counted)
    guides = Guides(tokenizer, VOCAB_SIZE, kept=2)
    for text in ("a", "b", "a", "a", "c", "a", "b"):
        guides.start(texts(GuideKind.REGEX, text))
    assert compiled == ["a", "b", "c", "b"]


def test_threads_may_check_and_start_at_once(guides: Guides, tokenizer: Tokenizer) -> None:
    wrong: list[str] = []

    def work(index: int) -> None:
        for turn in range(20):
            word = f"{'x' * (index + 1)}{turn % 3}"
            guide = texts(GuideKind.REGEX, word)
            if guides.check(guide) is not None or not follows(guides, tokenizer, guide, word):
                wrong.append(word)

    threads = [threading.Thread(target=work, args=(index % 2,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_tokenizer_without_an_end_is_refused() -> None:
    fast = FastTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    guides = Guides(Tokenizer(fast, eos_ids=frozenset(), bos_id=None, chat_template=None), 1)
    assert "end-of-text" in str(guides.check(texts(GuideKind.REGEX, "a")))


def test_a_vocabulary_whose_words_begin_with_a_space_is_followed_within_a_text() -> None:
    """Its decoder takes the space from the first word of a text, and its encoder puts one there."""
    symbols = ["<s>", "</s>", "<0x21>", "\u2581yes", "yes", "\u2581sir", "sir", "\u2581"]
    fast = FastTokenizer(models.Unigram([(symbol, -1.0) for symbol in symbols], unk_id=0, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    fast.add_special_tokens(["<s>", "</s>"])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(fast, eos_ids=frozenset({1}), bos_id=0, chat_template=None)
    assert (tokenizer.encode("yes"), tokenizer.decode([3, 5])) == ([3], "yes sir")
    state = Guides(tokenizer, len(symbols)).start(texts(GuideKind.REGEX, "yes( sir)?!"))
    found = []
    for token_id in (4, 5, 2, 1):
        found.append(only(state))
        state.advance((token_id,))
    assert found == [[4], [2, 5, 7], [2], [1]]


@pytest.mark.model
def test_a_real_vocabulary_follows_a_schema(smollm2_path: Path) -> None:
    from poolwright_engine.checkpoint.loader import load_model

    tokenizer = load_model(smollm2_path).tokenizer
    guides = Guides(tokenizer, tokenizer.vocab_size)
    guide = texts(GuideKind.JSON_SCHEMA, SCHEMA)
    assert follows(guides, tokenizer, guide, '{"name": "Bob", "age": 12}')
    assert follows(guides, tokenizer, guide, '{"name": "日本", "age": 0}')
    assert not follows(guides, tokenizer, guide, '{"name": "Bob", "age": "12"}')
