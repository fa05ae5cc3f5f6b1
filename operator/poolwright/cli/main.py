"""`poolwright`, and as a kubectl plug-in `kubectl poolwright`: every verb, its options and its help. No logic.

Each verb imports what it needs when it runs, so that help and completion stay fast and a router needs no operator.
"""

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


def _installed() -> str:
    from importlib.metadata import version as installed

    return installed("poolwright")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(_installed())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """LLM serving on prompt, token and mixed pools of machines."""


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
    files: Annotated[list[Path], typer.Argument(help="YAML or JSON files, or folders of them; `-` is standard input.")],
) -> None:
    """Check InferencePool manifests as the API server would, without one.

    Exit code 1 where one is bad, or where a file or folder holds none."""
    from poolwright.cli.validate import run

    raise typer.Exit(run(files))


@app.command()
def crd() -> None:
    """Print the CustomResourceDefinition."""
    from poolwright.api.crd import render

    typer.echo(render(), nl=False)


TraceOption = Annotated[
    str | None,
    typer.Option(
        "--trace",
        help="azure-code, azure-conversation, mooncake-conversation, or a CSV file with columns arrival_seconds, "
        "prompt_tokens, output_tokens.",
    ),
]
PromptTokensOption = Annotated[str | None, typer.Option(help="Instead of a trace: MEDIAN or MEDIAN,P90 of prompts.")]
OutputTokensOption = Annotated[str | None, typer.Option(help="Instead of a trace: MEDIAN or MEDIAN,P90 of answers.")]
RateOption = Annotated[float | None, typer.Option(help="Requests a second. Default: the trace's own.")]
SecondsOption = Annotated[float, typer.Option(help="How much of it: the first seconds of the trace.")]
TTFTOption = Annotated[float, typer.Option("--ttft", help="Target of the time to the first token, in seconds.")]
TBTOption = Annotated[
    float, typer.Option("--tbt", help="Target of the 99th percentile of a request's gaps, in seconds.")
]
NetworkOption = Annotated[float, typer.Option(help="Gbps of each machine's link to the others.")]
JSONOption = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command()
def plan(
    hardware: Annotated[
        list[str], typer.Option(help="A kind of machine by its name in the tables; several may be mixed by phase.")
    ],
    trace: TraceOption = None,
    prompt_tokens: PromptTokensOption = None,
    output_tokens: OutputTokensOption = None,
    rate: RateOption = None,
    seconds: SecondsOption = 120.0,
    ttft: TTFTOption = 2.0,
    tbt: TBTOption = 0.1,
    target: Annotated[float, typer.Option(help="Share of requests that are to meet both targets.")] = 0.9,
    machines: Annotated[int | None, typer.Option(help="How many there are. Default: the least that do.")] = None,
    most_machines: Annotated[int, typer.Option(help="Where the search for the least gives up.")] = 16,
    goal: Annotated[str, typer.Option(help="What the least is of: machines, cost or power.")] = "machines",
    network_gbps: NetworkOption = 200.0,
    every_split: Annotated[bool, typer.Option(help="Try all, not only those near the loads of the phases.")] = False,
    offline: Annotated[bool, typer.Option(help="No request has a deadline.")] = False,
    seed: Annotated[int, typer.Option(help="Of generated and repeated arrivals.")] = 0,
    as_json: JSONOption = False,
    resume: Annotated[
        Path | None, typer.Option(help="A file that keeps what was simulated, for the next time.")
    ] = None,
) -> None:
    """Simulate forms of a cluster and print the least that meets the targets: split, cost, power, KV ledger, verdict.

    Exit code 1 where none meets them. Ctrl-C prints what is known by then."""
    from poolwright.cli.plan import run

    raise typer.Exit(
        run(
            trace=trace,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            rate=rate,
            seconds=seconds,
            ttft_seconds=ttft,
            tbt_seconds=tbt,
            target=target,
            hardware=hardware,
            machines=machines,
            most_machines=most_machines,
            goal=goal,
            network_gbps=network_gbps,
            every_split=every_split,
            offline=offline,
            seed=seed,
            as_json=as_json,
            resume=resume,
        )
    )


@app.command()
def simulate(
    hardware: Annotated[str, typer.Option(help="The kind of machine by its name in the tables.")],
    machines: Annotated[int, typer.Option(help="How many of them.")],
    policy: Annotated[
        list[str],
        typer.Option(help="ours, a published one, or a static split such as 2P2T or 4M; several may be given."),
    ] = ["ours"],  # noqa: B006 - typer copies it
    trace: TraceOption = None,
    prompt_tokens: PromptTokensOption = None,
    output_tokens: OutputTokensOption = None,
    rate: RateOption = None,
    seconds: SecondsOption = 600.0,
    ttft: TTFTOption = 2.0,
    tbt: TBTOption = 0.1,
    network_gbps: NetworkOption = 200.0,
    exact: Annotated[bool, typer.Option("--exact", help="Run the engine's own scheduler in every step; slow.")] = False,
    seed: Annotated[int, typer.Option(help="Of generated and repeated arrivals.")] = 0,
    as_json: JSONOption = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write one page with a picture of each run, and the pictures beside it.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="A file that keeps what was simulated, for the next time.")
    ] = None,
) -> None:
    """Run policies on a trace in virtual time, and print what each attained.

    Ctrl-C prints what had been run by then."""
    from poolwright.cli.simulate import run

    raise typer.Exit(
        run(
            names=policy,
            trace=trace,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            rate=rate,
            seconds=seconds,
            ttft_seconds=ttft,
            tbt_seconds=tbt,
            hardware=hardware,
            machines=machines,
            network_gbps=network_gbps,
            exact=exact,
            seed=seed,
            as_json=as_json,
            html=html,
            resume=resume,
        )
    )


@app.command()
def ledger(
    model: Annotated[
        str | None,
        typer.Argument(help="opt-13b, opt-66b, llama-8b, llama-70b or bloom-176b. Default: DistServe's example."),
    ] = None,
    prompt_tokens: Annotated[float, typer.Option(help="Of one request.")] = 512.0,
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 10.0,
) -> None:
    """Print what KV a split moves over the network, and which share of links that is."""
    from poolwright.cli.plan import print_ledger

    print_ledger(model, prompt_tokens, rate)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(_installed())


def main() -> None:
    app()


if __name__ == "__main__":
    main()
