"""python -m onetrip.benchmarks: `onetrip bench`."""

import sys

from .command import app, bind_threads

if __name__ == "__main__":
    bind_threads(sys.argv[1:])
    app(prog_name="python -m onetrip.benchmarks")
