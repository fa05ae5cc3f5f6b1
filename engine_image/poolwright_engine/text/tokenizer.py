"""Text to ids and back: from GGUF metadata or a Hugging Face folder, with chat template and incremental decoding.

Owns what a model's files say about text. Knows nothing of requests, stop strings or HTTP.
"""

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from poolwright_engine.text.sentencepiece_bpe import sentencepiece_bpe

_SHORT_CHARACTERS = 1024


class TokenizerUnsupported(Exception):
    """The model's files lack a tokenizer that can be read; one line says what."""


class ChatTemplateError(Exception):
    """The messages cannot be rendered: the template refused them, or there is none. The client's fault: a 400."""


class Tokenizer:
    """Thread-safe; encoding long text releases the interpreter lock."""

    def __init__(
        self, fast: FastTokenizer, eos_ids: frozenset[int], bos_id: int | None, chat_template: str | None
    ) -> None:
        self.eos_ids = eos_ids
        self.bos_id = bos_id
        self.chat_template = chat_template
        self._fast = fast
        self._template = None if chat_template is None else _compile(chat_template)
        self._decoders = _decoder_types(fast)
        self._special_ids = frozenset(i for i, token in fast.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From the `tokenizer.*` metadata of a GGUF file. Raises TokenizerUnsupported."""
        fast = _fast_from_gguf(metadata)
        ends = (metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id"))
        return cls(
            fast,
            eos_ids=frozenset(int(i) for i in ends if i is not None),
            bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
            chat_template=metadata.get("tokenizer.chat_template"),
        )

    @classmethod
    def from_folder(cls, path: Path, vocab_size: int | None = None) -> "Tokenizer":
        """From tokenizer.json and the small files beside it. Added tokens beyond a model's vocabulary, as text models
        keep those of images, are left out. Raises TokenizerUnsupported."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerUnsupported("tokenizer.json is missing")
        try:
            text = file.read_text(encoding="utf-8")
            fast = FastTokenizer.from_str(text)
            if vocab_size is not None and fast.get_vocab_size(False) <= vocab_size < fast.get_vocab_size():
                fast = FastTokenizer.from_str(_without_added_tokens_from(text, vocab_size))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerUnsupported(f"tokenizer.json is not readable: {' '.join(str(error).split())}") from error
        settings = _read_json(path / "tokenizer_config.json")
        ends = _read_json(path / "generation_config.json").get("eos_token_id")
        if ends is None:
            ends = _read_json(path / "config.json").get("eos_token_id")
        named = [*(ends if isinstance(ends, list) else [ends]), _token_id(fast, settings.get("eos_token"))]
        if not all(end is None or isinstance(end, int) for end in named):
            raise TokenizerUnsupported(f"eos_token_id {ends!r} is no id")
        return cls(
            fast,
            eos_ids=frozenset(int(end) for end in named if end is not None),
            bos_id=_token_id(fast, settings.get("bos_token")),
            chat_template=_folder_template(path, settings),
        )

    @property
    def vocab_size(self) -> int:
        """Ids that have text, added tokens included; the model's vocabulary may be padded beyond it."""
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written out in the text become their ids. Text of a chat template has its own, so no more
        are added to it."""
        if len(text) <= _SHORT_CHARACTERS:
            return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
        # Only the library's batches let other threads run meanwhile.
        (encoded,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token's text alone, special tokens included."""
        return str(self._fast.decode([token_id], skip_special_tokens=False))

    def token_symbol(self, token_id: int) -> str:
        """One token as the vocabulary spells it; "" for an id that has none."""
        return self._fast.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes, which may be a part of a character."""
        symbol = self.token_symbol(token_id)
        if self.is_byte_level:
            return _bytes_of(symbol)
        if "ByteFallback" in self._decoders and (byte := _BYTE_TOKEN.fullmatch(symbol)):
            return bytes([int(byte[1], 16)])
        return self.token_text(token_id).encode()

    def bytes_within_text(self, token_id: int) -> bytes:
        """What one token adds where others stand before it: a decoder may take the space from a first word."""
        if self.is_special(token_id) or not {"Strip", "Metaspace"} & set(self._decoders):
            return self.token_bytes(token_id)
        symbol = self.token_symbol(token_id)
        byte = _BYTE_TOKEN.fullmatch(symbol)
        return bytes([int(byte[1], 16)]) if byte else symbol.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def with_chat_template(self, template: str) -> "Tokenizer":
        """The same ids under another template. Raises TokenizerUnsupported."""
        return Tokenizer(self._fast, self.eos_ids, self.bos_id, template)

    @property
    def is_byte_level(self) -> bool:
        """The bytes of the tokens, one after the other, are the text."""
        return self._decoders == ["ByteLevel"]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def to_json(self) -> str:
        """As a tokenizer.json holds it."""
        return str(self._fast.to_str())

    def detokenizer(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> "Detokenizer":
        """`prompt_ids`: the end of the prompt is enough."""
        if self.is_byte_level:
            return _ByBytes(self, prompt_ids, skip_special_tokens)
        return _ByStream(self._fast, prompt_ids, skip_special_tokens)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation; `variables` reach the template too. Raises ChatTemplateError."""
        if self._template is None:
            raise ChatTemplateError("the model has no chat template")
        names: dict[str, Any] = {
            "bos_token": self._special(self.bos_id),
            "eos_token": self._special(min(self.eos_ids, default=None)),
            "tools": None,
            "documents": None,
        }
        names |= variables
        try:
            return self._template.render(
                {**names, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
            )
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is a program: with a strange conversation it may raise anything
            raise ChatTemplateError(f"the chat template failed: {' '.join(str(error).split())}") from error

    def _special(self, token_id: int | None) -> str:
        return "" if token_id is None else (self._fast.id_to_token(token_id) or "")


class Detokenizer(Protocol):
    """Text of one sequence, token by token. A character whose bytes are spread over tokens comes whole with the last of
    them; bytes that the end of the output cuts off are never shown. So the concatenation is the text of the output."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty when it completes none."""
        ...


class _ByBytes:
    """Of a byte-level vocabulary: exact, and the same work for every token."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in prompt_ids:
            self.push(token_id)  # a prompt may end in the middle of a character

    def push(self, token_id: int) -> str:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))


class _ByStream:
    """Of any other vocabulary, through the library's own stream, which decodes again what has no text yet."""

    # A character has at most 4 bytes, so tokens that make no text for this long are no text at all.
    _MOST_TOKENS_WITHOUT_TEXT = 32
    _LONGEST_CHARACTER_TOKENS = 4

    def __init__(self, fast: FastTokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._fast = fast
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=skip_special_tokens)
        self._without_text: list[int] = []

    def push(self, token_id: int) -> str:
        try:
            text = self._stream.step(self._fast, token_id) or ""
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            # Bytes that form no text made the decoded prefix change.
            return self._anew([token_id])
        if text:
            self._without_text.clear()
            return text
        self._without_text.append(token_id)
        if len(self._without_text) < self._MOST_TOKENS_WITHOUT_TEXT:
            return ""
        tail = self._without_text[-self._LONGEST_CHARACTER_TOKENS :]
        del self._without_text[-self._LONGEST_CHARACTER_TOKENS :]
        return self._anew(tail)

    def _anew(self, token_ids: list[int]) -> str:
        """What had no text so far as it is, and a new stream from there on."""
        lost = str(self._fast.decode(self._without_text, skip_special_tokens=self._skip_special_tokens))
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        self._without_text.clear()
        return lost + "".join(self.push(token_id) for token_id in token_ids)


class TokenTexts:
    """The texts of one sequence's tokens, each alone, as log probabilities show them: a character whose bytes are in
    several tokens belongs to the last of them, and the others are empty. Joined, they are the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._partial = b""

    def of(self, token_id: int) -> str:
        """As if it came next."""
        return self._decode(token_id)[0]

    def push(self, token_id: int) -> str:
        """It came next."""
        text, self._partial = self._decode(token_id)
        return text

    def _decode(self, token_id: int) -> tuple[str, bytes]:
        if not self._partial:
            text = self._tokenizer.token_text(token_id)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                return text, b""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self._partial + self._tokenizer.token_bytes(token_id))
        return text, decoder.getstate()[0]


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_symbols() -> dict[str, int]:
    """How byte-level vocabularies spell the 256 bytes: those that print as themselves, the others from U+0100 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + order): byte for order, byte in enumerate(others)}


_BYTE_SYMBOLS = _byte_symbols()


def _bytes_of(symbol: str) -> bytes:
    """An added token is plain text, and so is not spelled this way where it holds a space."""
    try:
        return bytes(_BYTE_SYMBOLS[character] for character in symbol)
    except KeyError:
        return symbol.encode()


def _decoder_types(fast: FastTokenizer) -> list[str]:
    """The kinds of decoding steps, in order."""
    if fast.decoder is None:
        return []
    state = json.loads(fast.decoder.__getstate__())
    return [each["type"] for each in state.get("decoders", [state])]


# --- GGUF --------------------------------------------------------------------------------------------------------

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _pre_tokenizer(name: str) -> Any:
    """What splits text before byte-pair merging, by llama.cpp's name for it."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "default"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    pattern = {"llama-bpe": _LLAMA3_PATTERN, "llama3": _LLAMA3_PATTERN, "llama-v3": _LLAMA3_PATTERN}.get(name)
    if name == "qwen2":
        pattern = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise TokenizerUnsupported(
        f"GGUF pre-tokenizer {name} is not supported (supported: smollm, llama-bpe, qwen2, gpt-2)"
    )


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> FastTokenizer:
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    pre_tokenizer = _pre_tokenizer(pre)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.startswith("llama")))
    if pre == "qwen2":
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizer
    fast.decoder = decoders.ByteLevel()
    return fast


def _fast_from_gguf(metadata: Mapping[str, Any]) -> FastTokenizer:
    model = metadata.get("tokenizer.ggml.model")
    try:
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        if model == "gpt2":
            fast = _byte_level(metadata, tokens)
        elif model == "llama":
            fast = sentencepiece_bpe(
                tokens,
                metadata["tokenizer.ggml.scores"],
                types,
                unknown_id=metadata.get("tokenizer.ggml.unknown_token_id"),
                prefix_space=metadata.get("tokenizer.ggml.add_space_prefix", True),
            )
        else:
            raise TokenizerUnsupported(
                f"GGUF tokenizer {model} is not supported (supported: gpt2, which is byte-level BPE, and llama, which "
                "is SentencePiece BPE); a Hugging Face folder with tokenizer.json is read whatever its tokenizer"
            )
        for of_kind, add in ((_CONTROL, fast.add_special_tokens), (_USER_DEFINED, fast.add_tokens)):
            # A run of spaces, which SentencePiece lists too, is spelled otherwise and merged; it needs no mark.
            marked = [token for token, kind in zip(tokens, types, strict=True) if kind == of_kind]
            known = [token for token in marked if fast.token_to_id(token) is not None]
            add([AddedToken(token, normalized=False, special=of_kind == _CONTROL) for token in known])
    except TokenizerUnsupported:
        raise
    except KeyError as error:
        raise TokenizerUnsupported(f"metadata {error.args[0]} is missing") from error
    except Exception as error:  # the library raises bare Exception
        raise TokenizerUnsupported(f"the GGUF tokenizer is inconsistent: {' '.join(str(error).split())}") from error
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", model == "llama") and bos_id is not None:
        bos = tokens[bos_id]
        fast.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_id)]
        )
    return fast


# --- Hugging Face folder -----------------------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    """An absent file says nothing; a broken one is an error."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerUnsupported(f"{path.name} is not valid JSON") from error
    return value if isinstance(value, dict) else {}


def _without_added_tokens_from(tokenizer_json: str, first_id: int) -> str:
    content = json.loads(tokenizer_json)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < first_id]
    return json.dumps(content)


def _token_id(fast: FastTokenizer, token: Any) -> int | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return fast.token_to_id(text) if isinstance(text, str) else None


def _folder_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # named templates: the default one serves chat
        template = next((item.get("template") for item in template if item.get("name") == "default"), None)
    return template if isinstance(template, str) else None


# --- chat template -----------------------------------------------------------------------------------------------


def _compile(template: str) -> jinja2.Template:
    """In a sandbox that can neither reach Python's insides nor change the messages."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().astimezone().strftime(format)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise TokenizerUnsupported(f"the chat template is not valid: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    """Unlike jinja2's own, without HTML escapes, as templates expect."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(message)
