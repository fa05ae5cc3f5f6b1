"""`poolwright-engine`: the command line. Owns the commands and their help; everything else is called."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from poolwright_engine.cli import shell_completion
from poolwright_engine.process.config import ConfigError, EngineConfig, Usage
from poolwright_engine.process.last_words import EXIT_INTERRUPTED, fail
from poolwright_engine.process.openmp import spin_briefly
from poolwright_engine.process.options import Parser, add_model, add_server, config_of, warnings_of
from poolwright_engine.process.preflight import refuse_early
from poolwright_protocol import names

log = logging.getLogger(__name__)

PROGRAM = "poolwright-engine"
_ENVIRONMENT = f"""environment:
  {names.ENV_ROLE}, {names.ENV_ROLE_EPOCH}   role to start in (prompt, token or mixed) and its epoch
  {names.ENV_POD_UID}, {names.ENV_POD_IP}   this machine, and what peers connect to
  {names.ENV_POOL}, {names.ENV_POOL_NAMESPACE}   labels of the metrics
  {names.ENV_POOL_KEY}   64 hex digits shared by the pool; without it the admin and KV ports admit nobody
  {names.ENV_API_KEY}   as --api-key, out of the list of processes
  HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE   as the Hugging Face Hub's own tools read them

signals:
  SIGTERM, SIGINT   take nothing new, let running requests finish up to --shutdown-timeout; a second one cuts them off

exit codes:
  0 ended by a signal   1 the engine failed or stood still   2 options, environment or model   128 + n a second signal n
"""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == [shell_completion.COMMAND]:
        print("\n".join(shell_completion.candidates(make_parser(), words[1:])))
        return 0
    options = _parsed(words)
    if options.command == "version":
        print(version("poolwright"))
        return 0
    if options.command == "completion":
        print(shell_completion.script(options.shell, PROGRAM), end="")
        return 0
    spin_briefly()
    try:
        usage = Usage.SERVER if options.command in ("serve", "check", "profile") else Usage.OFFLINE
        config = config_of(options, usage)
        refuse_early(config)
        logging.basicConfig(
            level=options.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s %(message)s",
            stream=sys.stderr,
        )
        for warning in warnings_of(options):
            log.warning(warning)
        return int(_COMMANDS[options.command](config, options))
    except ConfigError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _serve(config: EngineConfig, _: argparse.Namespace) -> int:
    from prometheus_client import disable_created_metrics  # late: --help and a wrong option answer at once

    from poolwright_engine.process.lifecycle import serve

    disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the number of series and say nothing of use
    return asyncio.run(serve(config))


def _generate(config: EngineConfig, options: argparse.Namespace) -> int:
    from poolwright_engine.offline.one_shot import generate

    return asyncio.run(generate(config, options.prompt, options.max_tokens, options.temperature, options.raw))


def _check(config: EngineConfig, _: argparse.Namespace) -> int:
    from poolwright_engine.cli.check import check

    return check(config)


def _batch(config: EngineConfig, options: argparse.Namespace) -> int:
    from poolwright_engine.offline.batch import run

    return run(config, options.input, options.output, options.cost_per_hour)


def _profile(config: EngineConfig, options: argparse.Namespace) -> int:
    from poolwright_engine.offline.profile import profile

    return profile(config, options)


_COMMANDS = {"serve": _serve, "generate": _generate, "check": _check, "batch": _batch, "profile": _profile}


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """A word that stands alone is the model. argparse cannot be told so: it would take an optional word that follows an
    option for missing."""
    parser = make_parser()
    options, left = parser.parse_known_args(words)
    command = commands(parser)[options.command]
    if "model" in options and left and not left[0].startswith("-"):
        if options.model not in (None, left[0]):
            command.error(f"two models: {options.model} and {left[0]}")
        options.model = left.pop(0)
    command.refuse_unknown(left)
    if "model" in options and options.model is None:
        command.error("a MODEL is needed: a path, or a repository of the Hub")
    return options


def commands(parser: argparse.ArgumentParser) -> dict[str, Parser]:
    return next(dict(a.choices) for a in parser._actions if isinstance(a, argparse._SubParsersAction))


def make_parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description="LLM engine of a Poolwright machine: chunked prefill over a paged KV cache, OpenAI endpoints, "
        "and KV hand-off between machines.",
    )
    parser.add_argument("--version", action="version", version=version("poolwright"))
    added = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = added.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage=f"{PROGRAM} serve MODEL [options]",
        description="Serve a model. The API answers at once; /ready is 503 until the model has made a first token.",
        epilog=_ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(serve)
    add_server(serve)
    _add_log_level(serve, "info")

    check = added.add_parser(
        "check",
        help="say what would be served, or why it cannot be",
        usage=f"{PROGRAM} check MODEL [options]",
        description="Load a model as `serve` would, make one token, and print what was found and chosen. Refuses what "
        "`serve` would refuse.",
    )
    add_model(check)
    add_server(check)
    _add_log_level(check, "warning")

    generate = added.add_parser(
        "generate",
        help="print one answer and leave",
        usage=f"{PROGRAM} generate MODEL --prompt TEXT [options]",
        description="Print one answer.",
    )
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="what the model answers")
    generate.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="longest answer (default: %(default)s)"
    )
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)g)")
    generate.add_argument("--raw", action="store_true", help="continue the text, without the chat template")
    add_model(generate)
    _add_log_level(generate, "warning")

    batch = added.add_parser(
        "batch",
        help="answer a file of requests",
        usage=f"{PROGRAM} batch IN OUT --model MODEL [options]",
        description="Answer requests in OpenAI's batch format (custom_id, method, url, body), for "
        "/v1/completions and /v1/chat/completions, one line of OUT each, in the order they end. What OUT has answered "
        "already is not asked again, so an interrupted run is taken up by the same command.",
    )
    batch.add_argument("input", type=Path, metavar="IN", help="a .jsonl file of requests")
    batch.add_argument("output", type=Path, metavar="OUT", help="a .jsonl file of answers, appended to")
    batch.add_argument(
        "--cost-per-hour", type=float, metavar="DOLLARS", help="of this machine: also print what tokens cost"
    )
    add_model(batch)
    _add_log_level(batch, "warning")

    measured = added.add_parser(
        "profile",
        help="measure what steps cost on this machine",
        usage=f"{PROGRAM} profile MODEL [options]",
        description="Measure steps of prompt tokens and decodes over a grid, and fit seconds = fixed + a · tokens + "
        "b · tokens of context, for decodes alone and for steps with prompts.",
    )
    measured.add_argument("--json", action="store_true", help="print everything as JSON instead of a table")
    measured.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON here")
    add_model(measured)
    _add_log_level(measured, "warning")

    shells = added.add_parser(
        "completion",
        help="print what completes commands and options in a shell",
        description=f"For bash: source <({PROGRAM} completion bash)",
    )
    shells.add_argument("shell", choices=list(shell_completion.SHELLS), help="/".join(shell_completion.SHELLS))
    added.add_parser("version", help="print the version")
    return parser


def _add_log_level(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default=default, help="what is written to stderr"
    )
