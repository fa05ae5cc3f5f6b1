"""Tool calls in a model's text: found as it comes, and told apart from what it says.

Owns the forms that models write them in. Knows characters only; no token, no request and no body.
"""

import json
import re
from dataclasses import dataclass
from enum import Enum, auto

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")


class CallForm(Enum):
    TAGGED = auto()  # <tool_call>{"name": …, "arguments": …}</tool_call>, as Hermes and Qwen write
    BARE = auto()  # the whole text is {"name": …, "parameters": …}, more of them after ";", as Llama 3 writes
    LIST = auto()  # the whole text is [{"name": …, "parameters": …}, …]: what a guide makes of any tool
    NAMED = auto()  # the whole text is the arguments: what a guide makes of one tool


def form_of(chat_template: str | None) -> CallForm | None:
    """How a model with this template was taught to call tools; None: not at all, or in a form not known here."""
    if not takes_tools(chat_template):
        return None
    template = chat_template or ""
    if _OPEN in template:
        return CallForm.TAGGED
    if _PYTHON_TAG in template or ('"parameters"' in template and "ipython" in template):
        return CallForm.BARE
    return None


def takes_tools(chat_template: str | None) -> bool:
    return re.search(r"\btools\b", chat_template or "") is not None


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of the call `index`. `name` comes with the first part and only then."""

    index: int
    name: str | None = None
    arguments: str = ""


class ToolCalls:
    """Text in, in any pieces; out of it, in order, what the model says and the parts of its calls. `named`: the tool of
    NAMED. The parts of a call join to its arguments as written; where the output was cut, so are they.

    What may turn out to be the beginning of a call is held back, and so is a call until its name is known."""

    def __init__(self, form: CallForm, named: str = "") -> None:
        self.count = 0  # calls begun
        self._form = form
        self._named = named
        self._held = ""
        self._call: _Call | None = None
        self._begun = False  # the name of the call was given
        self._step = {CallForm.TAGGED: self._say, CallForm.NAMED: self._argue}.get(form, self._separate)

    def push(self, text: str) -> list[str | CallPart]:
        self._held += text
        made: list[str | CallPart] = []
        while self._held and self._step(made):
            pass
        return made

    def flush(self) -> list[str | CallPart]:
        """At the end of the text: what was held back and is no call."""
        text, self._held = self._held, ""
        if self._call is not None and not self._begun:
            text = self._call.text
            if self._form is CallForm.TAGGED:
                text = _OPEN + text
        elif self.count:
            text = text.strip()
        return [text] if text else []

    # Each takes what it can of `_held`, and says whether the next may go on with the rest.

    def _argue(self, made: list[str | CallPart]) -> bool:
        made.append(CallPart(0, None if self.count else self._named, self._held))
        self.count, self._held = 1, ""
        return True

    def _say(self, made: list[str | CallPart]) -> bool:
        if self.count:
            self._held = self._held.lstrip()  # the line between two calls
        at = self._held.find(_OPEN)
        keep = _overlap(self._held, _OPEN) if at < 0 else 0
        end = len(self._held) - keep if at < 0 else at
        if end:
            made.append(self._held[:end])
        self._held = self._held[end:]
        if at < 0:
            return False
        self._held = self._held[len(_OPEN) :]
        self._call = _Call()
        self._step = self._collect
        return True

    def _separate(self, made: list[str | CallPart]) -> bool:
        rest = self._held.lstrip()
        if self._form is CallForm.BARE and not self.count:
            if len(rest) < len(_PYTHON_TAG) and _PYTHON_TAG.startswith(rest):
                return False
            rest = rest.removeprefix(_PYTHON_TAG)
        rest = rest.lstrip(";, \n\t\r" if self._form is CallForm.BARE else "[,] \n\t\r")
        if self.count:
            self._held = rest
        if not rest:
            return False
        if rest[0] == "{":
            self._held, self._call, self._step = rest, _Call(), self._collect
        else:
            self._step = self._plain
        return True

    def _plain(self, made: list[str | CallPart]) -> bool:
        made.append(self._held)
        self._held = ""
        return True

    def _collect(self, made: list[str | CallPart]) -> bool:
        call = self._call
        if call is None:
            return False
        self._held = call.push(self._held)
        if call.name is not None and not self._begun:
            self._begun = True
            self.count += 1
            made.append(CallPart(self.count - 1, call.name, call.take()))
        elif self._begun and (more := call.take()):
            made.append(CallPart(self.count - 1, None, more))
        if not call.done:
            return True
        if self._begun and not call.has_arguments:
            made.append(CallPart(self.count - 1, None, "{}"))
        if not self._begun:
            made.append((_OPEN if self._form is CallForm.TAGGED else "") + call.text)
            self._step = self._say if self._form is CallForm.TAGGED else self._plain
        else:
            self._step = self._close if self._form is CallForm.TAGGED else self._separate
        self._call, self._begun = None, False
        return True

    def _close(self, made: list[str | CallPart]) -> bool:
        self._held = self._held.lstrip()
        if _CLOSE.startswith(self._held) and self._held != _CLOSE:
            return False
        self._held = self._held.removeprefix(_CLOSE)
        self._step = self._say
        return True


class _Call:
    """One JSON object of a call, as far as it is written: its name, and its arguments in the letters of the model.
    Anything else than an object is `done` at once, without a name."""

    def __init__(self) -> None:
        self.text = ""  # until the name is known
        self.name: str | None = None
        self.done = False
        self.has_arguments = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None  # None: a key is being written
        self._token = ""  # the key, or the value of a key other than the arguments
        self._space = ""  # within the arguments; dropped at their end
        self._ready = ""  # arguments not yet taken

    def push(self, text: str) -> str:
        """What follows the object's end."""
        for at, character in enumerate(text):
            if self.name is None:
                self.text += character
            self._take_in(character)
            if self.done:
                return text[at + 1 :]
        return ""

    def take(self) -> str:
        """Arguments since the last time."""
        ready, self._ready = self._ready, ""
        return ready

    def _take_in(self, character: str) -> None:
        if self._in_string:
            self._write(character)
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif not self._depth:
            self._depth = 1 if character == "{" else 0
            self.done = not self._depth and not character.isspace()
        elif character in "}]" and self._depth == 1:
            self._end_value()
            self._depth, self.done = 0, True
        elif character == "," and self._depth == 1:
            self._end_value()
        elif character == ":" and self._key is None:
            self._key, self._token = _string(self._token), ""
            if self._key in _ARGUMENTS:
                self.has_arguments, self._key = True, self._key if not self.has_arguments else ""
        else:
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            self._write(character)

    def _write(self, character: str) -> None:
        if self._key not in _ARGUMENTS:
            self._token += character
        elif character.isspace() and not self._in_string:
            self._space += character if self._token else ""
        else:
            self._ready += self._space + character
            self._space, self._token = "", "begun"

    def _end_value(self) -> None:
        if self._key == "name" and self.name is None:
            self.name = _string(self._token) or None
        self._key, self._token, self._space = None, "", ""


def _string(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
