"""Write tables of plain values as TOML that `tomllib` reads back equal. The standard library only reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}


def quoted(text: str) -> str:
    """A basic TOML string on one line."""
    out = []
    for char in text:
        if char in _ESCAPES:
            out.append(_ESCAPES[char])
        elif ord(char) < 0x20 or ord(char) == 0x7F:
            out.append(f"\\u{ord(char):04X}")
        else:
            out.append(char)
    return '"' + "".join(out) + '"'


def value_text(value: Any) -> str:
    """One value: text, truth value, whole number, number, or a list of them. Raises TypeError for anything else."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)  # the shortest digits that give the same double; inf and nan are TOML's spelling too
    if isinstance(value, list | tuple):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    raise TypeError(f"TOML text of {value!r} ({type(value).__name__}): expected text, bool, int, float or a list")


def dumps(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables one level deep, in the given order."""
    sections = []
    for table, values in tables.items():
        lines = [f"[{table}]"] + [f"{key} = {value_text(value)}" for key, value in values.items()]
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)
