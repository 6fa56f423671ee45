"""How our docstrings become Markdown: examples as code, names of classes and functions as code.

The reference loads it (zensical.toml); griffe calls it with every docstring that it reads.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod):(`[^`]+`)")
EXAMPLE = re.compile(r"^( *)>>> .*\n?(?:\1\S.*\n?)*", re.MULTILINE)


class AsMarkdown(griffe.Extension):
    """Fence the examples, which Markdown would take for quotations, and take Sphinx's roles away."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """
    >>> print(as_markdown("See :class:`Hidden`.\\n\\n>>> 1 + 1\\n2"))
    See `Hidden`.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return EXAMPLE.sub(lambda found: _fenced(found[0].rstrip("\n"), found[1]), ROLE.sub(r"\1", text))


def _fenced(example: str, indent: str) -> str:
    return f"{indent}```pycon\n{example}\n{indent}```\n"
