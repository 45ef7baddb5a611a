"""python -m onetrip: the command onetrip, where its script is not on PATH."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
