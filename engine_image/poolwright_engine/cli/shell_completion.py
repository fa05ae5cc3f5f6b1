"""Completion of `poolwright-engine` in a shell: a few lines for each shell, which ask the program itself.

So what is offered is what the parser takes, and there is nothing to generate again.
"""

import argparse
from collections.abc import Sequence

COMMAND = "complete"

_BASH = """_poolwright_engine() {{
  local IFS=$'\\n'
  COMPREPLY=($({program} {command} "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null))
}}
complete -o default -F _poolwright_engine {program}
"""
_ZSH = """#compdef {program}
_poolwright_engine() {{
  local -a found
  found=(${{(f)"$({program} {command} "${{(@)words[2,CURRENT]}}" 2>/dev/null)"}})
  if (( $#found )); then compadd -- $found; else _files; fi
}}
compdef _poolwright_engine {program}
"""
_FISH = """complete -c {program} -a '({program} {command} (commandline -opc)[2..] (commandline -ct))'
"""
SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def script(shell: str, program: str) -> str:
    return SHELLS[shell].format(program=program, command=COMMAND)


def candidates(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """What may stand for the last of `words`, which follow the program's name. Empty: a file, or anything."""
    commands = _commands(parser)
    partial = words[-1] if words else ""
    if len(words) < 2:
        return [name for name in commands if name.startswith(partial)]
    command = commands.get(words[0])
    if command is None:
        return []
    taken = {option: action for action in command._actions for option in action.option_strings}
    before = taken.get(words[-2])
    if before is not None and before.nargs != 0:
        return [str(choice) for choice in before.choices or () if str(choice).startswith(partial)]
    if partial.startswith("-"):
        shown = (option for option, action in taken.items() if action.help is not argparse.SUPPRESS)
        return sorted(option for option in shown if option.startswith(partial))
    positional = next((action for action in command._actions if not action.option_strings and action.choices), None)
    return [
        str(choice) for choice in (positional.choices or () if positional else ()) if str(choice).startswith(partial)
    ]


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(dict(a.choices) for a in parser._actions if isinstance(a, argparse._SubParsersAction))
