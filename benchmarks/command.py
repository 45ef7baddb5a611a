"""`onetrip bench`, which is also `python -m onetrip.benchmarks`: measure, print, record, compare, report.

Exits 0, 1 where a check failed, 2 on bad usage, 130 after Ctrl-C. Standard output holds the results alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    import torch

    from .measure.cases import Named
    from .run.options import Options

CHECK_FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130
_BUSY = 0.3  # of the CPUs: above it, other work would be timed too
_MEASURES_NOTHING = {"--everything", "compare", "report", "--list", "--render", "--help"}

app = typer.Typer(
    help="Check and time the kernels beside PyTorch's and other libraries' on this machine.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and no progress.")]


def _refuse(message: str) -> NoReturn:
    typer.echo(f"onetrip bench: {message}", err=True)
    raise typer.Exit(BAD_USAGE)


def _device(name: str | None) -> torch.device:
    import torch

    if name not in (None, "auto", "cpu", "cuda"):
        _refuse(f"--device {name}: no such device; there are auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        _refuse("--device cuda: torch sees no CUDA device")
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if name in (None, "auto") else name
    return torch.device(chosen)


def _missing_package() -> str:
    try:
        import jinja2  # noqa: F401
        import pytest_benchmark  # noqa: F401
    except ImportError as error:
        return f"{error.name} is missing: pip install 'onetrip[bench]'"
    return ""


def _render() -> None:
    from .measure import results
    from .measure.machine import checkout
    from .show import report

    root = checkout()
    if root is None:
        _refuse("--render needs a source tree: this is an installed package")
    report.write_docs(results.read(results.RECORDED), root / "docs/benchmarks.md")


def _recorded_folder(options: Options, output: Path | None) -> Path | None:
    """Where the run writes: where it was told to, and the whole suite in a source tree to the record in it."""
    from .measure import results
    from .measure.machine import checkout

    if output is not None:
        return output
    return results.RECORDED if checkout() is not None and not options.partial else None


def _select(options: Options, device: torch.device) -> dict[str, list[Named]]:
    from .measure.memory import shortage
    from .measure.results import UsageError
    from .run.selection import select

    try:
        selected = select(options)
    except UsageError as error:
        _refuse(str(error))
    if options.shapes:
        for case in (case for cases in selected.values() for case in cases):
            if reason := shortage(case, device):
                _refuse(f"{case.id} does not fit: {reason}")
    return selected


def _measure(
    options: Options, device: torch.device, output: Path | None, resume: bool, as_json: bool, selected: dict[str, Any]
) -> int:
    from .measure import results
    from .measure.machine import checkout, load_average
    from .run import runner
    from .run.selection import absent
    from .show import report

    load = load_average()
    if device.type == "cpu" and load is not None and load > _BUSY * (os.cpu_count() or 1):
        typer.echo(f"Other work is running (load average {load:.1f}): times will suffer, ratios less so.", err=True)
    if missing := absent(device):
        words = ", ".join(f"{name} ({why})" for name, why in missing.items())
        typer.echo(f"not raced against: {words}", err=True)
    found = runner.run(selected, device, options, output, resume, silent=as_json)
    if as_json:
        document = {"results": found.results, "failures": found.failures, "interrupted": found.interrupted}
        typer.echo(json.dumps(results.rounded(document), indent=1))
    elif found.results:
        report.print_results(found.results)
    for path in found.paths:
        typer.echo(f"wrote {path}", err=True)
    root = checkout()
    if output == results.RECORDED and root is not None and found.results and not found.interrupted:
        report.write_docs(results.read(results.RECORDED), root / "docs/benchmarks.md")
        typer.echo(f"rendered {root / 'docs/benchmarks.md'}", err=True)
    if device.type == "cpu" and (words := report.load_in_words(found.results)):
        typer.echo(words, err=True)
    for line in found.failures:
        typer.echo(f"FAILED {line}", err=True)
    if found.interrupted:
        kept = sum(len(content["cases"]) for content in found.results.values())
        again = "; --resume continues" if output is not None else ""
        typer.echo(f"interrupted: {kept} cases are done{again}", err=True)
        return INTERRUPTED
    return CHECK_FAILED if found.failures else 0


def _everything(
    device: torch.device,
    output: Path | None,
    quick: bool,
    part: list[str] | None,
    resume: bool,
    budget: float | None,
    as_json: bool,
) -> None:
    from .full_run import everything

    if output is None:
        _refuse("--everything: --output must name a folder")
    status = everything.run(
        output,
        device,
        quick=quick,
        parts=part,
        resume=resume,
        budget_s=float("inf") if budget is None else budget,
        as_json=as_json,
    )
    if status:
        raise typer.Exit(status)


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
        typer.Option(
            metavar="PROVIDER", help="Whom to race instead of everybody there; --list names them; repeatable."
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Cases to run: a glob over ids, or a part of them; with commas, several."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, fewer rounds.")] = False,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Write DIR/<machine>/<suite>.json.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out what DIR has of this very code.")] = False,
    everything: Annotated[
        bool, typer.Option("--everything", help="Tests, sanitizers, all suites, training, report, into --output DIR.")
    ] = False,
    part: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Of --everything, that part alone; a glob; repeatable.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Of --everything: end within them; --resume goes on.")
    ] = None,
    as_json: Json = False,
    list_: Annotated[bool, typer.Option("--list", help="What can be measured, and who can be raced against.")] = False,
    render: Annotated[
        bool, typer.Option("--render", help="Only render docs/benchmarks.md from the recorded JSON.")
    ] = False,
) -> None:
    """Check and time the kernels beside PyTorch's and other libraries' on this machine.

    The whole suite in a source tree is recorded in benchmarks/results and rendered to docs/benchmarks.md. A part of it
    (any of --op, --dtype, --shape, --pass, --against, --only, --quick) is only printed, unless --output names a folder.
    """
    if context.invoked_subcommand is not None:
        return
    if reason := _missing_package():
        _refuse(reason)
    from .measure.machine import header
    from .measure.results import UsageError, unwritable
    from .run.listing import listing, print_listing
    from .run.options import Options

    if render:
        _render()
        return
    chosen = _device(device)
    if list_:
        found = listing(chosen)
        typer.echo(json.dumps(found, indent=1)) if as_json else print_listing(found)
        return
    if everything:
        ignored = {
            "--op": op,
            "--dtype": dtype,
            "--shape": shape,
            "--pass": which,
            "--against": against,
            "--only": only,
        }
        if given := [name for name, value in ignored.items() if value]:
            _refuse(f"{', '.join(given)}: not of --everything, whose --part names what to run")
        _everything(chosen, output, quick, part, resume, budget, as_json)
        return
    if part or budget is not None:
        _refuse("--part and --budget belong to --everything")
    try:
        options = Options.parse(only, quick, op or (), dtype or (), shape or (), which or (), against or ())
    except UsageError as error:
        _refuse(str(error))
    folder = _recorded_folder(options, output)
    if resume and folder is None:
        _refuse("--resume: --output must name the folder that holds what was done")
    selected = _select(options, chosen)
    places = () if folder is None else (folder, folder / header(chosen)["machine"]["id"])
    for reason in filter(None, map(unwritable, places)):
        _refuse(reason)
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
    from .measure.results import UsageError
    from .show import compare as compare_

    try:
        found = compare_.compare(before, after)
    except UsageError as error:
        _refuse(str(error))
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        compare_.print_comparison(found, everything)
    if fail_on_slower and (found.count("slower") or found.lost):
        raise typer.Exit(CHECK_FAILED)


@app.command("report")
def report_(
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

    try:
        written = html_page.write(folder, output)
    except html_page.UsageError as error:
        typer.echo(f"onetrip bench report: {error}", err=True)
        raise typer.Exit(BAD_USAGE) from None
    if as_json:
        typer.echo(json.dumps(written.to_dict(), indent=1))
    else:
        typer.echo(f"wrote {written.path}", err=True)


def bind_threads(arguments: list[str]) -> None:
    """Start again with each OpenMP thread bound to a core, unless the user has chosen or nothing is to be measured.

    After a serial stretch (eager dropout draws its mask on one thread) the other thread may be woken on the core where
    the first one spins for it; the next parallel loop, whoever's it is, then waits for the scheduler's tick: 8 ms in
    place of 1 for a copy, measured on a virtual machine of 2 cores. libgomp reads the variable when it is loaded.
    """
    if "OMP_PROC_BIND" not in os.environ and not _MEASURES_NOTHING & set(arguments):
        os.environ["OMP_PROC_BIND"] = "true"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
