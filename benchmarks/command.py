"""`onetrip bench`, which is also `python -m onetrip.benchmarks`: measure, print, record, compare, report.

Exits with a code of command_line.py. Standard output holds the results alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from onetrip.command_line import BAD_USAGE, CHECK_FAILED, INTERRUPTED, Json

if TYPE_CHECKING:
    import torch

    from .measure.cases import Named
    from .runner import Options

_MEASURES_NOTHING = {"--everything", "compare", "report", "--list", "--render", "--help"}

app = typer.Typer(
    help="Check and time the kernels beside PyTorch's and other libraries' on this machine.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _reject(message: str, command: str = "") -> NoReturn:
    typer.echo(f"onetrip bench{command}: {message}", err=True)
    raise typer.Exit(BAD_USAGE)


@contextmanager
def _rejecting(command: str = "") -> Iterator[None]:
    """What cannot be done is a line on standard error."""
    from .measure.results import UsageError

    try:
        yield
    except UsageError as error:
        _reject(str(error), command)


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        _reject(f"not installed: {', '.join(missing)}; pip install 'onetrip[bench]'")


def _device(name: str | None) -> torch.device:
    import torch

    if name not in (None, "auto", "cpu", "cuda"):
        _reject(f"--device {name}: unknown value; choose from auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        _reject("--device cuda: torch sees no CUDA device")
    return torch.device("cuda" if torch.cuda.is_available() and name != "cpu" else "cpu")


def _hold_kernels() -> None:
    """onetrip's kernels to the instructions that ATEN_CPU_CAPABILITY holds torch's to."""
    from onetrip.ops.common.backends import native

    held, library = os.environ.get("ATEN_CPU_CAPABILITY"), native()
    if held in ("default", "avx2") and library is not None:
        library.set_cpu_level("baseline" if held == "default" else held)


def _render() -> None:
    from onetrip.environment import checkout

    from .measure import results
    from .show import docs_page

    root = checkout()
    if root is None:
        _reject("--render needs a source tree: this is an installed package")
    _require("jinja2", "matplotlib")
    docs_page.write(results.read(results.RECORDED), root / "docs/benchmarks.md")


def _select(options: Options, device: torch.device) -> dict[str, list[Named]]:
    from .measure.side_by_side import shortage
    from .runner import select

    selected = select(options)
    if options.get("shape"):
        for case in (case for cases in selected.values() for case in cases):
            if reason := shortage(case, device):
                _reject(f"{case.id} does not fit: {reason}")
    return selected


def _measure(
    options: Options, device: torch.device, output: Path | None, resume: bool, as_json: bool, selected: dict
) -> int:
    from onetrip.environment import checkout

    from . import runner
    from .measure import results
    from .measure.providers import absent_libraries
    from .show import tables

    if not options.get("against") and (words := absent_libraries(device)):
        typer.echo(f"not compared with: {words}", err=True)
    found = runner.run(selected, device, options, output, resume, silent=as_json)
    if as_json:
        document = {"results": found.results, "failures": found.failures, "interrupted": found.interrupted}
        typer.echo(json.dumps(results.rounded(document), indent=1))
    elif found.results:
        tables.print_results(found.results)
    for path in found.paths:
        typer.echo(f"wrote {path}", err=True)
    if output == results.RECORDED and checkout() is not None and found.results and not found.interrupted:
        _render()
        typer.echo("rendered docs/benchmarks.md", err=True)
    if device.type == "cpu" and (words := tables.load_in_words(found.results)):
        typer.echo(words, err=True)
    for line in found.failures:
        typer.echo(f"FAILED {line}", err=True)
    if found.interrupted:
        kept = sum(len(content["cases"]) for content in found.results.values())
        typer.echo(f"interrupted: {kept} cases are done{'; --resume continues' if output else ''}", err=True)
        return INTERRUPTED
    return CHECK_FAILED if found.failures else 0


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    op: Annotated[list[str] | None, typer.Option(help="Suite, operator or family of operators; repeatable.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, fp16 or bf16, of the grid or not; repeatable.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="ROWSxCOLS", help="Instead of the grid; repeatable.")
    ] = None,
    which: Annotated[
        list[str] | None, typer.Option("--pass", help="forward, backward or both (timed as one); repeatable.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="PROVIDER", help="Compare with these alone; --list names them; repeatable."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Cases to run: a glob over ids, or a part of them; with commas, several."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, fewer rounds.")] = False,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write here. A checkout's default: benchmarks/results.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what DIR has of this code; reject other.")] = False,
    everything: Annotated[
        bool, typer.Option("--everything", help="The full validation and benchmark suite of a GPU, into --output DIR.")
    ] = False,
    part: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Of --everything, that part alone; a glob; repeatable.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Of --everything: end after so many; --resume goes on.")
    ] = None,
    part_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Of --everything: stop a part that takes longer (3600).")
    ] = None,
    as_json: Json = False,
    list_: Annotated[bool, typer.Option("--list", help="What can be measured, and compared with what.")] = False,
    render: Annotated[
        bool, typer.Option("--render", help="Only render docs/benchmarks.md from the recorded JSON.")
    ] = False,
) -> None:
    """Check and time the kernels beside PyTorch's and other libraries' on this machine.

    The whole suite in a source tree is recorded in benchmarks/results and rendered to docs/benchmarks.md. A part of it
    (any of --op, --dtype, --shape, --pass, --against, --only, --quick) is only printed, unless --output names a folder.
    With ATEN_CPU_CAPABILITY=avx2 in the environment torch's kernels and onetrip's run as on a CPU without AVX-512.
    """
    if context.invoked_subcommand is not None:
        return
    from onetrip.environment import checkout, header

    from . import runner
    from .measure.results import PARTIAL, RECORDED, unwritable

    chosen = _device(device)
    _hold_kernels()
    if list_:
        found = runner.listing(chosen)
        typer.echo(json.dumps(found, indent=1)) if as_json else runner.print_listing(found)
        return
    with _rejecting():
        options = runner.Options.parse(only, quick, op=op, dtype=dtype, shape=shape, against=against, **{"pass": which})
        if render:
            if options.words or everything or output is not None:
                _reject("--render takes no cases and no folder")
            return _render()
        if everything:
            if options.values or only is not None:
                _reject(f"--everything takes no {options.words[-1]}: --part names what to run")
            if output is None:
                _reject("--everything: --output must name a folder")
            _require("pytest", "jinja2", "matplotlib")
            from .full_run import everything as full_run

            given = {"budget_s": budget, "part_s": part_limit}
            limits = full_run.Limits(**{name: seconds for name, seconds in given.items() if seconds is not None})
            raise typer.Exit(full_run.run(output, chosen, quick, part, resume, limits, as_json))
        if part or budget is not None or part_limit is not None:
            _reject("--part, --budget and --part-limit belong to --everything")
        # The whole suite in a source tree is written to the record in it.
        folder = RECORDED if output is None and checkout() is not None and not options.words else output
        if folder == RECORDED:
            _require("jinja2", "matplotlib")
        if resume and folder is None:
            _reject("--resume: --output must name the folder that holds what was done")
        selected = _select(options, chosen)
        places = () if folder is None else (folder, folder / header(chosen)["machine"]["id"])
        for reason in filter(None, map(unwritable, places)):
            _reject(reason)
        unfinished = [places[-1] / f"{suite}{PARTIAL}" for suite in selected if places and not resume]
        for path in filter(Path.exists, unfinished):
            typer.echo(f"{path} is replaced; --resume would go on with it", err=True)
        try:
            status = _measure(options, chosen, folder, resume, as_json, selected)
        except KeyboardInterrupt:
            status = INTERRUPTED
    if status:
        raise typer.Exit(status)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A suite's JSON, or a folder of them.")],
    after: Annotated[Path, typer.Argument(help="The same, of a later run.")],
    everything: Annotated[bool, typer.Option("--all", help="Show what did not change too.")] = False,
    fail_on_slower: Annotated[
        bool, typer.Option("--fail-on-slower", help="Exit 1 where something became slower or lost its number.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What became faster or slower from one recorded run to another, beyond noise."""
    from onetrip import terminal

    from .show import compare as compare_

    with _rejecting():
        found = compare_.compare(before, after)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        terminal.show(compare_.parts(found, everything))
    if fail_on_slower and (found["summary"]["slower"] or found["lost"]):
        raise typer.Exit(CHECK_FAILED)


@app.command()
def report(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="What --output named; in a source tree the recorded results.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="PATH", help="File or folder to write to, instead of DIR/report.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Every machine's results as one HTML page: tables that sort, figures, targets; it needs no network."""
    from .show import html_page

    with _rejecting(" report"):
        written = html_page.write(folder, output)
    if as_json:
        typer.echo(json.dumps(written, indent=1))
    else:
        typer.echo(f"wrote {written['path']}", err=True)


def bind_threads(arguments: list[str]) -> None:
    """Start again with each OpenMP thread bound to a core, unless the user has chosen or nothing is to be measured.

    After a serial stretch (eager dropout draws its mask on one thread) the other thread may be woken on the core where
    the first one spins for it; the next parallel loop then waits for the scheduler's tick: 8 ms in
    place of 1 for a copy, measured on a virtual machine of 2 cores. libgomp reads the variable when it is loaded.
    """
    if "OMP_PROC_BIND" not in os.environ and not _MEASURES_NOTHING & set(arguments):
        os.environ["OMP_PROC_BIND"] = "true"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
