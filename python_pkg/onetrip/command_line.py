"""What every command shares: exit codes and --json."""

from __future__ import annotations

from typing import Annotated

import typer

CHECK_FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and no progress.")]
