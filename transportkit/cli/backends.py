"""`transportkit backends`: what is installed and, if asked, what of it is usable here."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from transportkit.cli.terminal import say
from transportkit.discovery import Found, discover


def run(*, as_json: bool, check: bool) -> None:
    """Print the list; without ``check`` nothing but metadata of distributions is read."""
    installed = discover()
    rows: list[dict[str, Any]] = [
        {"name": one.name, "distribution": one.distribution, "version": one.version, "target": one.value}
        for one in installed
    ]
    if check:
        for row, reason in zip(rows, _reasons(installed), strict=True):
            row["usable"], row["reason"] = not reason, reason
    if as_json:
        say(json.dumps(rows, indent=2))
        return
    titles = {"name": "BACKEND", "distribution": "DISTRIBUTION", "version": "VERSION", "target": "TARGET"}
    if check:
        titles["usable"] = "USABLE HERE"
    table = [list(titles.values())]
    for row in rows:
        cells = [str(row[key]) for key in titles if key != "usable"]
        table.append([*cells, "yes" if row["usable"] else f"no: {row['reason']}"] if check else cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    if not check:
        for text in dict.fromkeys(one.conflict for one in installed if one.conflict):
            say(f"note: {text}")


def _reasons(installed: tuple[Found, ...]) -> list[str]:
    """For each, why it cannot be used here; empty where it can."""
    from transportkit.registry import ALLOW_VARIABLE, DISABLE_VARIABLE, Failure, survey
    from transportkit.site import read_site

    allowed, disabled = _names(ALLOW_VARIABLE), _names(DISABLE_VARIABLE)
    with contextlib.redirect_stdout(sys.stderr):  # a plugin may print while it is imported
        results = survey(read_site("unix"), installed)
    reasons = []
    for one, result in zip(installed, results, strict=True):
        if isinstance(result, Failure):
            reasons.append(result.reason)
        elif one.name in disabled:
            reasons.append(f"disabled by {DISABLE_VARIABLE}")
        elif allowed and one.name not in allowed:
            reasons.append(f"not among those that {ALLOW_VARIABLE} allows")
        else:
            reasons.append("")
    return reasons


def _names(variable: str) -> set[str]:
    return {name.strip() for name in os.environ.get(variable, "").split(",")} - {""}
