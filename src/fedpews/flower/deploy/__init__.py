"""A deployment: the programs of a coordinator and of a site, and the files that they need."""

from __future__ import annotations

import re
from importlib import resources


def template(file: str, **values: object) -> str:
    """A file of this folder, with each ``@name@`` replaced by its value."""
    text = resources.files("fedpews.flower.deploy").joinpath(file).read_text()
    return re.sub(r"@(\w+)@", lambda match: str(values[match[1]]), text)
