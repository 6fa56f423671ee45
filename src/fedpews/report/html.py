"""Runs as one HTML page that needs nothing else: no file beside it, no request, no build."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedpews.report.collect import collect
from fedpews.report.runs import Run, find_runs
from fedpews.results.files import write_atomically

STYLES = ("vendor/uPlot.min.css", "page.css")
SCRIPTS = ("vendor/uPlot.iife.min.js", "base.js", "charts.js", "masks.js", "page.js")


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Write the page of one run or of several side by side."""
    return write_html(path, make_report(find_runs(folders)))


def write_html(path: Path, text: str) -> Path:
    """Write a page, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode(errors="backslashreplace"))
    return path


def make_report(runs: Sequence[Run]) -> str:
    """The page as text. It makes no request."""
    return render(collect(runs))


def render(
    data: Mapping[str, Any], live: bool = False, page: str = "page.html", scripts: Sequence[str] = SCRIPTS
) -> str:
    """The page of a document, by default of one that ``collect`` returns.

    A live page polls its own server, any other makes no request. ``page`` is the file with the skip link, in its first
    line, and the content; shell.html is around it.

    Names in the document come from folders and configurations of others: they stay text. Everything in it is
    escaped, scripts put it on the page as text only, and the policy lets no script run but the page's own.
    """
    style, script = _read(STYLES), _read(scripts)
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script)}",
            "style-src 'unsafe-inline'",
            "connect-src 'self'" if live else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    parts = {
        "policy": policy,
        "title": escape(str(data["title"])),
        "style": style,
        "plain": "".join(f"<p>{escape(sentence)}</p>" for sentence in data["headline"]),
        "live": "true" if live else "false",
        "script": script,
        "data": as_script(data),
    }
    skip, _, main = _read([page]).partition("\n")
    template = _read(["shell.html"]).replace("{{ skip }}", skip).replace("{{ main }}", main) + "\n"
    # one pass from left to right: inserted text is not searched again
    return re.sub(r"\{\{ (\w+) \}\}", lambda match: parts[match[1]], template)


def as_script(data: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element, whatever its strings hold.

    >>> as_script({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _read(names: Sequence[str]) -> str:
    folder = files("fedpews.report") / "page"
    return "\n".join((folder / name).read_text(encoding="utf-8").rstrip() for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
