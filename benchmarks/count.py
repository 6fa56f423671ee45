"""How large the package is: files, lines, functions and functions of five lines or fewer, by folder.

python benchmarks/count.py [FOLDER]      (default src/fedpews)
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "src/fedpews")
    files, lines, functions, small = Counter(), Counter(), Counter(), Counter()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        folder = f"{parts[0]}/" if len(parts) > 1 else "top level"
        text = path.read_text()
        files[folder] += 1
        lines[folder] += len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions[folder] += 1
                small[folder] += (node.end_lineno or node.lineno) - node.lineno < 5
    for folder in (*sorted(files), None):
        counts = [
            counter.total() if folder is None else counter[folder]
            for counter in (files, lines, functions, small)
        ]
        print(f"{folder or 'all':12}" + "".join(f"{count:>9,}" for count in counts))


if __name__ == "__main__":
    main()
