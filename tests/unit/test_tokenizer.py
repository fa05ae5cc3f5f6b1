"""Text to ids and back: the real model's tokenizer against transformers', streams that never show half a character."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers

from poolwright_engine.text.tokenizer import ChatTemplateError, Tokenizer, TokenizerUnsupported, TokenTexts
from support.tiny_llama import END, write_byte_tokenizer

TEXTS = [
    "Hello, world!",
    "In 2024 there were 1,234,567 of them — “quoted”, naïve, Straße.",
    "def f(x):\n    return x ** 2\n\n\n# done\t\n",
    "日本語のテキスト、한국어, العربية, हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b",
    "   leading and trailing   ",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 12 + 30?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye 👋"},
    ],
]


def streamed(tokenizer: Tokenizer, token_ids: list[int], prompt_ids: list[int] | None = None, **options: Any) -> str:
    detokenizer = tokenizer.detokenizer(prompt_ids or [], **options)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    return "".join(pieces)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    import gguf

    fields = gguf.GGUFReader(smollm2_path).fields
    return Tokenizer.from_gguf({name: fields[name].contents() for name in fields if name.startswith("tokenizer.")})


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_the_real_tokenizer_gives_transformers_ids_and_gives_the_text_back(
    smollm2: Tokenizer, theirs: Any, text: str
) -> None:
    ids = smollm2.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert streamed(smollm2, ids, skip_special_tokens=False) == text


@pytest.mark.model
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_chat_prompt_is_transformers(
    smollm2: Tokenizer, theirs: Any, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    text = smollm2.render_chat(messages, add_generation_prompt)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert smollm2.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.model
def test_the_real_tokenizer_knows_its_special_ids(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_id, smollm2.eos_ids) == (1, {2})
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.decode([2]) == ""
    assert streamed(smollm2, [2, *smollm2.encode("ok"), 2]) == "ok"


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose every token is one byte: the hardest case for a stream."""
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def by_bytes(byte_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_folder)


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.text(max_size=10),
    text=st.text(st.characters(exclude_characters="\N{REPLACEMENT CHARACTER}", exclude_categories=["Cs"]), max_size=20),
)
def test_a_stream_of_bytes_gives_whole_characters(by_bytes: Tokenizer, prompt: str, text: str) -> None:
    assert streamed(by_bytes, by_bytes.encode(text), by_bytes.encode(prompt)) == text


def test_a_character_comes_with_the_last_of_its_bytes(by_bytes: Tokenizer) -> None:
    detokenizer = by_bytes.detokenizer(by_bytes.encode("x"))
    assert [detokenizer.push(token_id) for token_id in by_bytes.encode("a€b")] == ["a", "", "", "€", "b"]


def test_bytes_that_the_end_cuts_off_are_not_shown(by_bytes: Tokenizer) -> None:
    assert streamed(by_bytes, by_bytes.encode("ok👋")[:-1]) == "ok"


def test_bytes_that_are_no_text_do_not_stop_the_stream(by_bytes: Tokenizer) -> None:
    stray = by_bytes.encode("€")[1]
    detokenizer = by_bytes.detokenizer()
    text = "".join(detokenizer.push(token_id) for token_id in [stray, stray, *by_bytes.encode("fine")])
    assert text.endswith("fine")


def test_a_character_that_the_prompt_began_is_completed(by_bytes: Tokenizer) -> None:
    ids = by_bytes.encode("日本")
    assert streamed(by_bytes, ids[4:], ids[:4]) == "本"


def test_text_offsets_add_up_because_a_character_belongs_to_its_last_byte(by_bytes: Tokenizer) -> None:
    texts = TokenTexts(by_bytes)
    assert [texts.push(token_id) for token_id in by_bytes.encode("a€👋")] == ["a", "", "", "€", "", "", "", "👋"]
    for token_id in by_bytes.encode("€")[:2]:
        texts.push(token_id)
    last, other = by_bytes.encode("€")[2], by_bytes.encode("x")[0]
    assert (texts.of(last), texts.of(other), texts.push(last)) == ("€", "\N{REPLACEMENT CHARACTER}x", "€")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=40))
def test_the_stream_of_any_bytes_is_their_text(by_bytes: Tokenizer, token_ids: list[int]) -> None:
    """But for a character that the end cuts off."""
    detokenizer = by_bytes.detokenizer()
    text = "".join(detokenizer.push(token_id) for token_id in token_ids)
    whole = by_bytes.decode(token_ids)
    assert whole.startswith(text)
    assert len(whole) - len(text) <= 1
    assert by_bytes.token_bytes(256) == END.encode()
    assert b"".join(by_bytes.token_bytes(i) for i in token_ids if i < 256).decode(errors="replace") == whole


@pytest.fixture(scope="module")
def with_fallback() -> Tokenizer:
    """As SentencePiece models are stored: words begin with ▁, and what has no token is spelled in bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "▁a": 258, "b": 259}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True))
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(fast, frozenset(), None, None)


def test_bytes_among_words_make_whole_characters_too(with_fallback: Tokenizer) -> None:
    ids = with_fallback.encode(" a€b 👋 a")
    assert streamed(with_fallback, ids) == " a€b 👋 a"
    assert with_fallback.token_bytes(ids[1]) == "€".encode()[:1]
    assert with_fallback.token_bytes(258) == b" a"


def test_bytes_that_never_make_text_are_given_as_they_are_and_cost_no_more_each(with_fallback: Tokenizer) -> None:
    """The library's stream would decode all of them again for each."""
    detokenizer = with_fallback.detokenizer()
    seconds = []
    shown = ""
    for _ in range(8):
        started = time.process_time()
        for _ in range(1000):
            shown += detokenizer.push(0x80)
        seconds.append(time.process_time() - started)
    assert set(shown) == {"\N{REPLACEMENT CHARACTER}"}
    assert len(shown) > 7900
    assert min(seconds[4:]) < 3 * seconds[0]  # it would be at least nine times as long
    assert "".join(detokenizer.push(i) for i in with_fallback.encode("ab")).endswith("ab")


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({}, {256}),
        ({"generation_config.json": {"eos_token_id": [7, 9]}, "config.json": {"eos_token_id": 3}}, {7, 9, 256}),
        ({"config.json": {"eos_token_id": 3}}, {3, 256}),
        ({"tokenizer_config.json": {"eos_token": {"content": END}}}, {256}),
        ({"tokenizer_config.json": {}}, set()),
    ],
)
def test_end_ids_come_from_every_file_that_names_them(tmp_path: Path, files: dict[str, Any], eos_ids: set[int]) -> None:
    write_byte_tokenizer(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.from_folder(tmp_path).eos_ids == eos_ids


def with_template(folder: Path, template: Any) -> Tokenizer:
    write_byte_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": template}))
    return Tokenizer.from_folder(folder)


def test_a_template_may_be_named_default_or_lie_in_a_file_of_its_own(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    assert with_template(tmp_path, named).render_chat([{"role": "user", "content": "hey"}]) == "hey!"
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}{{ eos_token }}")
    assert Tokenizer.from_folder(tmp_path).render_chat([{"role": "user", "content": "hey"}]) == f"1{END}"


def test_a_template_sees_extra_variables_and_plain_json(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{{ tools | tojson }}{% if enable_thinking %} think{% endif %}")
    text = tokenizer.render_chat([], tools=[{"name": "<é>"}], enable_thinking=True)
    assert text == '[{"name": "<é>"}] think'


def test_what_a_template_refuses_is_an_error_of_the_client(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        tokenizer.render_chat([])
    tokenizer = with_template(tmp_path, "{{ 'x' + messages[0].content }}")
    with pytest.raises(ChatTemplateError, match="the chat template failed"):
        tokenizer.render_chat([{"role": "user", "content": ["not", "text"]}])
    with pytest.raises(ChatTemplateError, match="no chat template"):
        with_template(tmp_path, None).render_chat([])


@pytest.mark.parametrize(
    "attack", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__ }}"]
)
def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path, attack: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokenizer = with_template(tmp_path, attack)
    try:
        rendered = tokenizer.render_chat(messages)
    except ChatTemplateError:
        rendered = ""
    assert "class" not in rendered
    assert "modules" not in rendered
    assert messages == [{"role": "user", "content": "hi"}]


def test_a_gguf_pre_tokenizer_splits_as_its_model_was_trained() -> None:
    def pieces(pre: str, text: str) -> list[str]:
        symbols = {symbol: index for index, symbol in enumerate("ĠĊ0123456789abc'sx")}
        tokenizer = Tokenizer.from_gguf(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": pre,
                "tokenizer.ggml.tokens": [*symbols, "12", "123", "Ġa", "'s"],
                "tokenizer.ggml.token_type": [1] * (len(symbols) + 4),
                "tokenizer.ggml.merges": ["1 2", "12 3", "Ġ a", "' s"],
            }
        )
        return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text)]

    assert pieces("smollm", "x 123 a's") == ["x", " ", "1", "2", "3", " a", "'s"]
    assert pieces("gpt-2", "x 123 a's") == ["x", " ", "123", " a", "'s"]
    assert pieces("llama-bpe", "x 1234 a's") == ["x", " ", "123", "4", " a", "'s"]


def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(TokenizerUnsupported, match=r"metadata tokenizer\.ggml\.merges is missing"):
        Tokenizer.from_gguf(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.tokens": ["a"],
                "tokenizer.ggml.token_type": [1],
            }
        )
