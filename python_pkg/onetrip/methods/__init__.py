"""The methods that are said to make training faster or smaller, each measured beside the same baseline."""

from .catalog import METHODS, NAMES, Method, Recipe, Setting, combine
from .report import render, sections, tables, write_page
from .runs import load_previous, own_failures, run, write_json
from .session import Options, Session
from .verdict import memory_verdict, speed_verdict

__all__ = [
    "METHODS",
    "NAMES",
    "Method",
    "Options",
    "Recipe",
    "Session",
    "Setting",
    "combine",
    "load_previous",
    "memory_verdict",
    "own_failures",
    "render",
    "run",
    "sections",
    "speed_verdict",
    "tables",
    "write_json",
    "write_page",
]
