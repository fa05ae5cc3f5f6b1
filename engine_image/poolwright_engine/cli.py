"""`poolwright-engine`: the command line. Owns options and their help; everything else is called."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from poolwright_engine.config import DEFAULT_SHUTDOWN_SECONDS, DTYPES, ConfigError, EngineConfig, from_environment
from poolwright_engine.last_words import fail
from poolwright_protocol import names

_ENVIRONMENT = f"""environment:
  {names.ENV_ROLE}, {names.ENV_ROLE_EPOCH}   role to start in (prompt, token or mixed) and its epoch
  {names.ENV_POD_UID}, {names.ENV_POD_IP}   this machine, and what peers connect to
  {names.ENV_POOL}, {names.ENV_POOL_NAMESPACE}   labels of the metrics
  {names.ENV_POOL_KEY}   64 hex digits shared by the pool; without it the admin and KV ports admit nobody
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.command == "version":
        from poolwright_engine.responses import VERSION

        print(VERSION)
        return 0
    try:
        config = _config(options)
        if not config.model.exists():
            raise ConfigError(f"--model: model path {config.model} does not exist")
        return _generate(config, options) if options.command == "generate" else _serve(config, options)
    except ConfigError as error:
        return fail(str(error))


def _serve(config: EngineConfig, options: argparse.Namespace) -> int:
    from prometheus_client import disable_created_metrics  # late: --help and a wrong option answer at once

    from poolwright_engine.process import serve

    logging.basicConfig(
        level=options.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the number of series and say nothing of use
    return asyncio.run(serve(config))


def _generate(config: EngineConfig, options: argparse.Namespace) -> int:
    from poolwright_engine.one_shot import generate

    return asyncio.run(generate(config, options.prompt, options.max_tokens, options.temperature, options.raw))


def _config(options: argparse.Namespace) -> EngineConfig:
    given = {name: value for name, value in vars(options).items() if name in EngineConfig.__dataclass_fields__}
    given["served_model_name"] = given.get("served_model_name") or options.model.name
    return EngineConfig(**{**from_environment(), **given})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="poolwright-engine",
        description="LLM engine of a Poolwright machine: chunked prefill over a paged KV cache, OpenAI endpoints, "
        "and KV hand-off between machines.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model. The API answers at once; /ready is 503 until the model has made a first token.",
        epilog=_ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(serve)
    serve.add_argument("--served-model-name", metavar="NAME", help="what clients call it (default: the path's name)")
    serve.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=names.API_PORT, help="API port, 0: any (default: %(default)s)")
    serve.add_argument(
        "--admin-port", type=int, default=names.ADMIN_PORT, help="roles, bearer token (default: %(default)s)"
    )
    serve.add_argument(
        "--kv-port", type=int, default=names.KV_PORT, help="prefill requests and KV of peers (default: %(default)s)"
    )
    serve.add_argument(
        "--shutdown-timeout",
        dest="shutdown_timeout_seconds",
        type=float,
        default=DEFAULT_SHUTDOWN_SECONDS,
        metavar="SECONDS",
        help="how long SIGTERM lets running requests finish (default: %(default)g)",
    )
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")

    generate = commands.add_parser("generate", help="print one answer and leave", description="Print one answer.")
    _add_model(generate)
    generate.add_argument("--prompt", required=True, metavar="TEXT")
    generate.add_argument("--max-tokens", type=int, default=64, metavar="N", help="(default: %(default)s)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)g)")
    generate.add_argument("--raw", action="store_true", help="continue the text, without the chat template")

    commands.add_parser("version", help="print the version")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="PATH",
        help="a .gguf file, or a Hugging Face folder with safetensors",
    )
    parser.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt + answer (default: the model's)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, metavar="N", help="tokens per step (default: %(default)s)"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=256, metavar="N", help="running requests (default: %(default)s)"
    )
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens per block (default: 16)")
    parser.add_argument(
        "--kv-cache-mebibytes", type=int, default=512, metavar="N", help="size of the KV cache (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="float32", metavar="|".join(DTYPES), help="(default: %(default)s)")
    parser.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="split long prompts over steps (default: on)",
    )
    parser.add_argument("--cpu-threads", type=int, metavar="N", help="threads of a step (default: all cores)")
    parser.add_argument(
        "--cpu-duty-percent", type=int, default=100, metavar="N", help="use at most this share of one core"
    )
    for kind in ("tensor", "pipeline", "data"):
        parser.add_argument(f"--{kind}-parallel-size", type=int, default=1, metavar="1", help="only 1 is supported")


if __name__ == "__main__":
    sys.exit(main())
