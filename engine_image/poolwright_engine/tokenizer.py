"""Text to ids and back: from GGUF metadata or a Hugging Face folder, with chat template and incremental decoding.

Owns what a model's files say about text. Knows nothing of requests, stop strings or HTTP.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream


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
        self.has_chat_template = chat_template is not None
        self._fast = fast
        self._template = None if chat_template is None else _compile(chat_template)

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
    def from_folder(cls, path: Path) -> "Tokenizer":
        """From tokenizer.json and the small files beside it. Raises TokenizerUnsupported."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerUnsupported("tokenizer.json is missing")
        try:
            fast = FastTokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerUnsupported(f"tokenizer.json is not readable: {' '.join(str(error).split())}") from error
        settings = _read_json(path / "tokenizer_config.json")
        ends = _read_json(path / "generation_config.json").get("eos_token_id")
        if ends is None:
            ends = _read_json(path / "config.json").get("eos_token_id")
        eos_ids = set(ends if isinstance(ends, list) else [ends])
        eos_ids.add(_token_id(fast, settings.get("eos_token")))
        return cls(
            fast,
            eos_ids=frozenset(int(i) for i in eos_ids if i is not None),
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
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """What log probabilities show of one token: its text alone, special tokens included."""
        return str(self._fast.decode([token_id], skip_special_tokens=False))

    def detokenizer(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> "Detokenizer":
        return Detokenizer(self._fast, prompt_ids, skip_special_tokens)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation; `variables` reach the template too. Raises ChatTemplateError."""
        if self._template is None:
            raise ChatTemplateError("the model has no chat template")
        names: dict[str, Any] = {
            "bos_token": self._special(self.bos_id),
            "eos_token": self._special(min(self.eos_ids, default=None)),
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


class Detokenizer:
    """Text of one sequence, token by token. A character whose bytes are spread over tokens comes whole with the last of
    them; bytes that the end of the output cuts off are never shown. So the concatenation is the text of the output."""

    def __init__(self, fast: FastTokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._fast = fast
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=skip_special_tokens)

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty when it completes none."""
        try:
            return self._stream.step(self._fast, token_id) or ""
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            # Bytes that form no text made the decoded prefix change; start anew from here.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            return self._stream.step(self._fast, token_id) or ""


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
    if name in ("llama-bpe", "llama3", "llama-v3"):
        split = pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise TokenizerUnsupported(f"GGUF pre-tokenizer {name} is not supported (supported: smollm, llama-bpe, gpt-2)")


def _fast_from_gguf(metadata: Mapping[str, Any]) -> FastTokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise TokenizerUnsupported(
            f"GGUF tokenizer {model} is not supported (supported: gpt2, which is byte-level BPE); "
            "a Hugging Face folder with tokenizer.json is read whatever its tokenizer"
        )
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    pre_tokenizer = _pre_tokenizer(pre)
    try:
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.startswith("llama")))
    except KeyError as error:
        raise TokenizerUnsupported(f"metadata {error.args[0]} is missing") from error
    except Exception as error:  # the library raises bare Exception
        raise TokenizerUnsupported(f"the GGUF tokenizer is inconsistent: {' '.join(str(error).split())}") from error
    fast.pre_tokenizer = pre_tokenizer
    fast.decoder = decoders.ByteLevel()
    marked = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    for token, kind in marked:
        added = AddedToken(token, normalized=False, special=kind == _CONTROL)
        (fast.add_special_tokens if kind == _CONTROL else fast.add_tokens)([added])
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") and bos_id is not None:
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
