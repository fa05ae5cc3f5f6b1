"""What a request of the OpenAI API may say, as vLLM 0.32 reads it.

Owns the fields, their types and the rules between them. Fields it has never heard of are accepted; fields that would
change the output and are not implemented are refused by name. Knows no engine, no tokenizer and no HTTP server.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from poolwright_engine.api.api_error import bad_parameter, bad_request

MAX_STOP_STRINGS = 4
MAX_PROMPTS = 1024  # of one completions request
MAX_CHOICES = 128  # of one prompt
MAX_SEQUENCES = 1024  # of one request: prompts times choices
MAX_TOOLS = 128
MAX_SALT_CHARACTERS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
# Counted by hand: of a union pydantic would refuse both branches, and speak of a string that was never meant.
Stops = str | Annotated[list[str], Field(json_schema_extra={"maxItems": MAX_STOP_STRINGS})]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=(), allow_inf_nan=False)


class StreamOptions(_Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(_Fields):
    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Fields):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(_Fields):
    json_schema: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationRequest(_Fields):
    """What completions and chat share. `spaces_between_special_tokens` is accepted, and no tokenizer read here puts
    such spaces in."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: Int64 | None = None
    stop: Stops | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    min_tokens: int | None = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: Int64 = 0
    cache_salt: str | None = None
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise bad_parameter("Stream options can only be defined when `stream=True`.", "stream_options")
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP_STRINGS:
            raise bad_parameter(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}.", "stop")
        if self.prompt_logprobs is not None:
            if self.stream and (self.prompt_logprobs > 0 or self.prompt_logprobs == -1):
                raise bad_parameter("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
            if self.prompt_logprobs < -1:
                raise bad_parameter(
                    "`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", self.prompt_logprobs
                )
        form = self.response_format
        if form is not None and form.type == "json_schema" and form.json_schema is None:
            message = "When response_format type is 'json_schema', the 'json_schema' field must be provided."
            raise bad_parameter(message, "response_format")
        if self.cache_salt is not None:
            _check_salt(self.cache_salt)
        if self.request_id is not None and not _NAME.fullmatch(self.request_id):
            message = "request_id must be 1 to 128 letters, digits, or any of `_.:-`."
            raise bad_parameter(message, "request_id", self.request_id)
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Raises ApiError."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if any(not stop for stop in stops):
            raise bad_request("stop cannot contain an empty string.", "stop")
        return tuple(stops)

    @property
    def choices(self) -> int:
        """How many answers to one prompt the client gets. Raises ApiError."""
        return _count("n", 1 if self.n is None else self.n)

    @property
    def tries(self) -> int:
        """How many are generated, of which the best are given. Raises ApiError."""
        if self.best_of is None:
            return self.choices
        tries = _count("best_of", self.best_of)
        if tries < self.choices:
            raise bad_parameter(f"best_of must be at least n={self.choices}, got {tries}.", "best_of", tries)
        if tries > self.choices and self.stream:
            raise bad_parameter("A stream cannot be the best of several; best_of must equal n.", "best_of", tries)
        return tries

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    default_max_tokens: ClassVar[int | None] = 16  # None: up to the context's end

    prompt: list[int] | list[list[int]] | str | list[str] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_prompt(self) -> "CompletionRequest":
        prompt = self.prompt
        nested = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        if not prompt or (nested and not all(prompt)):
            raise bad_parameter("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        if self.logprobs is not None and self.logprobs < -1:
            raise bad_parameter("`logprobs` must be a positive value or -1.", "logprobs", self.logprobs)
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Raises ApiError for too many."""
        prompt: Any = self.prompt
        prompts: list[str | list[int]] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        if len(prompts) > MAX_PROMPTS:
            message = f"prompt list length {len(prompts)} exceeds the maximum allowed count of {MAX_PROMPTS}."
            raise bad_parameter(message, "prompt")
        if len(prompts) * self.tries > MAX_SEQUENCES:
            message = (
                f"{len(prompts)} prompts of {self.tries} choices are more than the {MAX_SEQUENCES} allowed at once."
            )
            raise bad_parameter(message, "prompt")
        return prompts

    @property
    def only_echo(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0


class ToolFunction(_Fields):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Fields):
    type: Literal["function"] = "function"
    function: ToolFunction

    def for_template(self) -> dict[str, Any]:
        function = self.function
        fields: dict[str, object] = {
            "name": function.name,
            "description": function.description,
            "parameters": function.parameters,
        }
        if function.strict is not None:
            fields["strict"] = function.strict
        return {"type": "function", "function": fields}


class NamedFunction(_Fields):
    name: str


class NamedTool(_Fields):
    type: Literal["function"] = "function"
    function: NamedFunction


class Message(BaseModel):
    """One turn. `content` is text or a list of text parts; what else a part may be is refused by name."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        """Raises ApiError."""
        fields = {key: value for key, value in (self.model_extra or {}).items() if value not in (None, [])}
        for name in ("function_call", "audio"):
            if name in fields:
                raise bad_parameter(f"`{name}` in messages is not supported by this engine.", "messages")
        if self.content is None and self.role != "assistant":
            raise bad_parameter(f"A message of role {self.role} needs content.", "messages")
        if self.tool_calls and self.role == "assistant":
            fields["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return {**fields, "role": self.role, "content": self.text}

    @property
    def text(self) -> str:
        """Raises ApiError."""
        if not isinstance(self.content, list):
            return self.content or ""
        texts = []
        for part in self.content:
            if isinstance(part, str):
                texts.append(part)
                continue
            kind = part.get("type", "text")
            text = part.get("refusal" if kind == "refusal" else "text")
            if kind not in ("text", "input_text", "output_text", "refusal"):
                raise bad_parameter(f"Content of type `{kind}` is not supported; this model reads text.", "messages")
            if not isinstance(text, str):
                raise bad_parameter(f"A content part of type `{kind}` needs a string.", "messages")
            texts.append(text)
        return "\n".join(texts)


class Conversation(_Fields):
    """What chat and its tokenizing share: all that the prompt is made of."""

    messages: list[Message]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _check_conversation(self) -> "Conversation":
        if not self.messages:
            raise bad_parameter("messages must hold at least one message.", "messages")
        if self.tools == []:
            message = "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely."
            raise bad_parameter(message, "tools")
        if self.continue_final_message and self.add_generation_prompt:
            message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
            raise bad_request(message, "continue_final_message")
        if self.chat_template is not None or "chat_template" in (self.chat_template_kwargs or {}):
            raise bad_parameter(
                "`chat_template` is not supported by this engine; the model's is used.", "chat_template"
            )
        return self

    @property
    def rendered_tools(self) -> list[dict[str, Any]] | None:
        return [tool.for_template() for tool in self.tools] if self.tools else None

    @property
    def variables(self) -> dict[str, Any]:
        """What the template sees beside the messages. Raises ApiError."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("enable_thinking", self.reasoning_effort != "none")
            variables["reasoning_effort"] = self.reasoning_effort
        if self.documents is not None:
            variables["documents"] = self.documents
        return variables | {"tools": self.rendered_tools}


class ChatCompletionRequest(GenerationRequest, Conversation):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    echo: bool = False
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    return_prompt_text: bool | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and self.top_logprobs < -1:
            raise bad_parameter("`top_logprobs` must be a positive value or -1.", "top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise bad_parameter("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise bad_parameter("When using `tool_choice`, `tools` must be set.", "tool_choice")
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if named is not None and named not in [tool.function.name for tool in self.tools or []]:
            message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
            raise bad_parameter(message, "tool_choice")
        return self

    @property
    def role(self) -> str:
        """Of the answer."""
        return "assistant" if self.add_generation_prompt else self.messages[-1].role

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def one_call(self) -> bool:
        return self.parallel_tool_calls is False


class TokenizeRequest(_Fields):
    """Of `prompt`, or of `messages` as chat would see them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # None: as the endpoint of that kind does
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _check(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise bad_parameter("Expected either prompt or messages.", "prompt")
        if self.messages is not None:
            self.conversation  # noqa: B018  raises what is wrong with it
        return self

    @property
    def conversation(self) -> Conversation:
        """Of a request with messages."""
        fields = {**(self.model_extra or {}), "messages": self.messages}
        return Conversation.model_validate(fields | {"add_special_tokens": bool(self.add_special_tokens)})


class DetokenizeRequest(_Fields):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


# What this engine does not do, and the values that ask for nothing. Anything else is refused by name.
_NOT_IMPLEMENTED: Mapping[str, Sequence[Any]] = {
    "use_beam_search": (None, False),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "suffix": (None, ""),
    "prompt_embeds": (None,),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "structural_tag": (None,),
    "guided_whitespace_pattern": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "watermarking": (None, False),
    "kv_transfer_params": (None,),
    "ec_transfer_params": (None,),
    "thinking_token_budget": (None, -1),
    "repetition_detection": (None,),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
}
# Of chat, which a completion would have to ignore.
_OF_CHAT: Mapping[str, Sequence[Any]] = {
    "messages": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "top_logprobs": (None, 0),
    "continue_final_message": (None, False),
}
_OF_STRUCTURED_OUTPUTS: Mapping[str, Sequence[Any]] = {
    "structural_tag": (None,),
    "whitespace_pattern": (None,),
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
}


def check_supported(request: GenerationRequest) -> None:
    """Raises ApiError that names the first field this engine cannot honour."""
    refused = {**_NOT_IMPLEMENTED, **(_OF_CHAT if isinstance(request, CompletionRequest) else {})}
    _refuse(request.model_extra, refused, "")
    if request.structured_outputs is not None:
        _refuse(request.structured_outputs.model_extra, _OF_STRUCTURED_OUTPUTS, "structured_outputs.")
    if request.response_format is not None and request.response_format.type == "structural_tag":
        raise bad_parameter("`structural_tag` is not supported by this engine.", "response_format")


def _refuse(fields: Mapping[str, Any] | None, refused: Mapping[str, Sequence[Any]], at: str) -> None:
    for name, value in (fields or {}).items():
        if name in refused and not any(_same(value, harmless) for harmless in refused[name]):
            raise bad_parameter(f"`{at}{name}` is not supported by this engine.", f"{at}{name}")


def _same(value: object, harmless: object) -> bool:
    """0 and 0.0 are the same, True and 1 are not."""
    return isinstance(value, bool) == isinstance(harmless, bool) and value == harmless


def _count(name: str, value: int) -> int:
    if value < 1:
        raise bad_request(f"{name} must be at least 1, got {value}.", name)
    if value > MAX_CHOICES:
        raise bad_request(f"{name} must be at most {MAX_CHOICES}, got {value}.", name)
    return value


def _check_salt(salt: str) -> None:
    if not salt:
        raise bad_parameter("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > MAX_SALT_CHARACTERS or any(character in "@/\\\x00" for character in salt):
        message = (
            f"Parameter 'cache_salt' must be at most {MAX_SALT_CHARACTERS} characters and must not contain '@', '/', "
            "'\\\\', or NUL."
        )
        raise bad_parameter(message, "cache_salt")


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates take the arguments as an object; a history whose arguments are none is carried on with an empty one.
    Raises ApiError."""
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        message = "chat completions only support assistant tool_calls of type 'function'."
        raise bad_parameter(message, "tool_calls")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def fit_max_tokens(prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """The output length of one prompt: what was asked for (0: any), as far as the model's length allows. Raises
    ApiError."""
    if max_tokens > max_model_len:
        raise bad_parameter(
            f"max_tokens={max_tokens} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            "max_tokens",
            max_tokens,
        )
    if prompt_tokens > max_model_len:
        raise bad_parameter(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            prompt_tokens,
        )
    room = max_model_len - prompt_tokens
    if not room:
        raise bad_parameter("max_tokens must be at least 1, got 0.", "max_tokens", 0)
    return min(max_tokens or room, room)
