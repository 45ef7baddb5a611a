"""An extension of griffe, which reads docstrings for the site: lines "name: what it is" become a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

LINE = re.compile(r"(?P<names>\w+(?:, \w+)*): (?P<rest>.*)")


def listed(text: str, names: set[str]) -> str:
    """The docstring as Markdown. names: of the parameters."""
    lines, in_list = [], False
    for line in text.replace("*", r"\*").split("\n"):
        found = LINE.fullmatch(line)
        if found and names.issuperset(found["names"].split(", ")):
            if not in_list:
                lines.append("")
            line, in_list = f"- `{found['names']}`: {found['rest']}", True
        elif not line:
            in_list = False
        lines.append(line)
    return "\n".join(lines)


class ParameterLists(griffe.Extension):
    """Changes the docstrings of functions and classes."""

    def on_function(self, *, func: Any, **_: Any) -> None:
        self._list(func, func)

    def on_class(self, *, cls: Any, **_: Any) -> None:
        self._list(cls, cls.members.get("__init__"))

    @staticmethod
    def _list(documented: Any, function: Any) -> None:
        if documented.docstring is not None:
            names = {parameter.name for parameter in getattr(function, "parameters", ())}
            documented.docstring.value = listed(documented.docstring.value, names)
