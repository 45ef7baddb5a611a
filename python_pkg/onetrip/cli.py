"""The commands. Arguments in, tables or JSON out; what they do lives in doctor.py, anatomy/ and methods/."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from . import __version__
from .benchmarks import command as bench
from .command_line import BAD_USAGE, CHECK_FAILED, INTERRUPTED, Json

if TYPE_CHECKING:
    from .anatomy.measure import Progress as ProgressCallback

app = typer.Typer(
    help="Fused kernels for training transformers: every tensor makes one trip through memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onetrip {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    # Read by torch's profiler when it first starts: else it prints two lines on every trace.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@contextmanager
def _progress(shown: bool) -> Iterator[ProgressCallback | None]:
    """A bar on standard error, so that standard output holds the result alone."""
    if not shown:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


@app.command()
def doctor(as_json: Json = False) -> None:
    """What works on this machine and why not, and a numeric self-check of every kernel on every device."""
    from . import doctor as doctor_

    with _progress(not as_json) as progress:
        report = doctor_.examine(progress)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        Console().print(doctor_.render(report))
    if not report.healthy:
        raise typer.Exit(CHECK_FAILED)


@app.command()
def anatomy(
    model: Annotated[str, typer.Argument(help="A preset that needs no download, a local folder, or a hub id.")],
    batch_size: Annotated[int, typer.Option(help="Sequences (or images) a step.")] = 8,
    sequence_length: Annotated[int, typer.Option(help="Tokens a sequence.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of weights and activations: float32, bfloat16 or float16.")] = "float32",
    autocast: Annotated[
        str | None, typer.Option(help="torch.autocast in forward: bfloat16 or float16 (Trainer's bf16, fp16).")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="adamw (torch's), adam, adamw8bit, adam8bit, sgd or sgd-momentum.")
    ] = "adamw",
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:N. Where nothing is run, auto is cuda, with or without a GPU.")
    ] = "auto",
    steps: Annotated[int, typer.Option(help="Timed steps of each kind; medians are shown.")] = 5,
    columns: Annotated[
        str,
        typer.Option(help="Of eager, patched, patched_loss (with linear_cross_entropy), patched_adamw8bit, compiled."),
    ] = "eager,patched,patched_adamw8bit",
    fits: Annotated[
        str | None,
        typer.Option(
            help="A memory size, as 16GB: does the step fit, and which batch does? Runs nothing. --json is for scripts."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="The same for a GPU, as A100-40GB; and a lower bound of the step's time there."),
    ] = None,
    predict_only: Annotated[
        bool, typer.Option(help="Predict the memory; run nothing, on no device. For CUDA, or --device cpu.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Folder to write anatomy.json and anatomy.html in.")] = None,
    as_json: Json = False,
) -> None:
    """One training step taken apart: bytes by class of tensor, predicted and measured; milliseconds by phase."""
    from . import anatomy as anatomy_
    from .anatomy.report import render

    try:
        options = anatomy_.Options(
            model,
            batch_size,
            sequence_length,
            dtype,
            optimizer,
            device,
            steps,
            columns=tuple(name.strip() for name in columns.split(",") if name.strip()),
            fits=fits,
            gpu=gpu,
            predict_only=predict_only,
            autocast=autocast,
        )
        folder = anatomy_.writable_folder(output) if output is not None else None
        with _progress(not as_json) as progress:
            result = anatomy_.compare(options, progress)
    except anatomy_.UsageError as error:
        typer.echo(f"onetrip anatomy: {error}", err=True)
        raise typer.Exit(BAD_USAGE) from None
    if folder is not None:
        for path in anatomy_.write(result, folder):
            typer.echo(f"wrote {path}", err=True)
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        Console().print(render(result.to_dict()))


@app.command()
def methods(
    model: Annotated[str, typer.Argument(help="A preset that needs no download, a local folder, or a hub id.")],
    batch_size: Annotated[int, typer.Option(help="Sequences (or images) a step of the baseline.")] = 8,
    sequence_length: Annotated[int, typer.Option(help="Tokens a sequence.")] = 128,
    steps: Annotated[int, typer.Option(help="Timed training steps of each method; fewer than 5 give no verdict.")] = 20,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    only: Annotated[list[str] | None, typer.Option(help="A method by its name; may be given again.")] = None,
    combine: Annotated[
        list[str] | None, typer.Option(help="Methods at once, as fused-kernels+adamw8bit; may be given again.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write methods.json and methods.html in.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what methods.json in --output has measured.")] = False,
    as_json: Json = False,
) -> None:
    """Each method of training faster or smaller, measured here: does it improve speed, does it save memory.

    Methods: batch-2x, batch-4x, accumulation, checkpointing, bf16, fp16, tf32, adamw-fused, adamw8bit,
    gradient-release, adafactor, sgd, bnb-adamw8bit, torchao-adamw8bit, preloading, datasets-map, datasets-stream,
    empty-cache, flash-attention-2, compile, lora, zero, zero-offload, fused-kernels, linear-cross-entropy, combined,
    combined-memory.
    """
    from . import methods as methods_
    from .anatomy import UsageError, writable_folder

    options = methods_.Options(
        model, batch_size, sequence_length, steps, dtype, device, tuple(only or ()), tuple(combine or ())
    )
    try:
        options.check()
        folder = writable_folder(output) if output is not None else None
        if resume and folder is None:
            raise UsageError("--resume needs --output, the folder of the run to go on with")
        previous = methods_.load_previous(folder) if resume and folder is not None else None
        save = None if folder is None else partial(methods_.write_json, folder=folder)
        with _progress(not as_json) as progress:
            result = methods_.run(options, progress, save=save, previous=previous)
    except UsageError as error:
        typer.echo(f"onetrip methods: {error}", err=True)
        raise typer.Exit(BAD_USAGE) from None
    if folder is not None:
        typer.echo(f"wrote {folder / 'methods.json'} and {methods_.write_page(result, folder)}", err=True)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        Console().print(methods_.render(result))
    if result["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if failed := methods_.own_failures(result):
        typer.echo(f"onetrip methods: {', '.join(failed)} failed", err=True)
        raise typer.Exit(CHECK_FAILED)


def main() -> None:
    """Entry point of the `onetrip` command."""
    for stream in (sys.stdout, sys.stderr):  # may be ASCII: "?" for other characters
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if sys.argv[1:2] == ["bench"]:
        bench.bind_threads(sys.argv[2:])
    try:
        app()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        typer.echo(f"onetrip: {error.strerror}", err=True)
        os._exit(CHECK_FAILED)  # at exit Python would try to write the rest
