"""A vocabulary without merges gives the ids that SentencePiece itself gives with it."""

import io
import random
import string
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from poolwright_engine.text.tokenizer import Tokenizer, TokenizerUnsupported

WORDS = (
    "the",
    "then",
    "other",
    "mother",
    "thermal",
    "naïve",
    "Straße",
    "über",
    "hello",
    "world",
    "don't",
    "1234",
    "日本語",
)
TEXTS = [
    "hello world",
    "  hello   world  ",
    "the other mother's thermal naïve Straße",
    "日本語 한국어 👩‍👩‍👧 e\u0301",
    "don't\nhello\tworld\r\n",
    "aaaaaaaaaaaaaaaaaaaaa",
    "<0x41> <unk> is text",
    "",
    " ",
]


def train(**options: Any) -> sentencepiece.SentencePieceProcessor:
    """A BPE vocabulary of a made-up corpus, with no normalization, as those of Llama 2 and Gemma have none."""
    chance = random.Random(0)
    made_up = ["".join(chance.choices(string.ascii_lowercase[:8], k=chance.randint(2, 7))) for _ in range(200)]
    corpus = [" ".join(chance.choices((*WORDS, *made_up), k=8)) for _ in range(600)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.999,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def as_gguf(processor: sentencepiece.SentencePieceProcessor, **metadata: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of it."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(processor.serialized_model_proto())
    own = {
        "model": "llama",
        "tokens": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces],
        "token_type": [piece.type for piece in proto.pieces],
        "unknown_token_id": processor.unk_id(),
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (own | metadata).items()}


@pytest.fixture(scope="module", params=[True, False], ids=["space before", "no space before"])
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    theirs = train(add_dummy_prefix=request.param)
    return Tokenizer.from_gguf(as_gguf(theirs, add_space_prefix=request.param, add_bos_token=False)), theirs


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_sentencepiece_and_give_the_text_back(
    pair: tuple[Tokenizer, sentencepiece.SentencePieceProcessor], text: str
) -> None:
    ours, theirs = pair
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids) == text


def test_ids_of_random_texts_are_sentencepiece(pair: tuple[Tokenizer, sentencepiece.SentencePieceProcessor]) -> None:
    ours, theirs = pair
    chance = random.Random(1)
    for _ in range(500):
        words = chance.choices((*WORDS, "abc", "fade", " ", "  ", "-", "é", "木", "\n"), k=chance.randint(1, 9))
        text = chance.choice(("", " ")).join(words)
        assert ours.encode(text) == theirs.encode(text), repr(text)


def test_special_tokens_are_read_whole_and_a_text_begins_with_bos_unless_the_file_says_otherwise() -> None:
    theirs = train(control_symbols=["<turn>"], user_defined_symbols=["<tag>"], add_dummy_prefix=False)
    ours = Tokenizer.from_gguf(as_gguf(theirs, add_space_prefix=False))
    hello = theirs.encode("hello")
    turn, tag = theirs.piece_to_id("<turn>"), theirs.piece_to_id("<tag>")
    assert ours.encode("<turn>hello<tag>hello") == [theirs.bos_id(), turn, *hello, tag, *hello]
    assert ours.encode("hello", add_special_tokens=False) == hello
    assert ours.decode([turn, *hello, tag]) == "hello<tag>"
    assert ours.eos_ids == {theirs.eos_id()}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token_type": None}, "inconsistent"),
        ({"scores": [0.0]}, "inconsistent"),
        ({"unknown_token_id": 10**6}, "inconsistent"),
        ({"model": "t5"}, "GGUF tokenizer t5 is not supported"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TokenizerUnsupported, match=says):
        Tokenizer.from_gguf(as_gguf(train(), **changes))
