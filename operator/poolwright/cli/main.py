"""`poolwright`, and as a kubectl plug-in `kubectl poolwright`: every verb, its options and its help. No logic.

Each verb imports what it needs when it runs, so that help and completion stay fast and a router needs no operator.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="poolwright",
    help="LLM serving on prompt, token and mixed pools of machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_FORWARD, add_help_option=False)
def operator(context: typer.Context) -> None:
    """Run the operator. `poolwright operator --help` lists its options."""
    from poolwright.controller.app import main as run

    raise typer.Exit(run(context.args))


@app.command(context_settings=_FORWARD, add_help_option=False)
def router(context: typer.Context) -> None:
    """Run the router of one pool. `poolwright router --help` lists its options."""
    from poolwright.router.main import main as run

    raise typer.Exit(run(context.args))


@app.command()
def demo(
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="An InferencePool. Default: the example of the repository.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A GGUF file or a folder of safetensors. Default: SmolLM2-135M, fetched once.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the same traffic first with mode Paused, and compare.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Go on serving after the summary, until Ctrl-C.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the traffic.")] = 0,
) -> None:
    """Serve a real small model on this machine, and watch machines move between the pools."""
    from poolwright.local.demo import main as run

    raise typer.Exit(run(file=file, model=model, compare=compare, keep=keep, seed=seed))


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(help="YAML files; `-` is standard input.")],
) -> None:
    """Check InferencePool manifests as the API server would, without one. Exit code 1 if any is bad."""
    import yaml

    from poolwright.api.models import InferencePool, InvalidPool

    bad = 0
    for file in files:
        try:
            text = sys.stdin.read() if str(file) == "-" else file.read_text()
            documents = [document for document in yaml.safe_load_all(text) if document is not None]
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            typer.echo(f"{file}: {error}", err=True)
            bad += 1
            continue
        for document in documents:
            if isinstance(document, dict) and document.get("kind") != "InferencePool":
                continue
            try:
                pool = InferencePool.parse(document)
                typer.echo(f"{file}: {pool.metadata.name}: valid")
            except InvalidPool as error:
                bad += 1
                for path, message in error.errors:
                    typer.echo(f"{file}: {path}: {message}", err=True)
    raise typer.Exit(1 if bad else 0)


@app.command()
def crd() -> None:
    """Print the CustomResourceDefinition."""
    from poolwright.api.crd import render

    typer.echo(render(), nl=False)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    typer.echo(installed("poolwright"))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
