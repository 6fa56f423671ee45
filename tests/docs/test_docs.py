"""The docs are true: their code runs, their tables are complete, their site builds without a broken link."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args
from urllib.parse import unquote

import pytest
import typer
from filelock import FileLock

import fedpews
from fedpews import errors
from fedpews.cli import app
from fedpews.experiment import Experiment

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES_WITH_CODE = ["tutorial.md", "models.md", "data.md"]
NOTEBOOK = ROOT / "examples" / "tour.ipynb"


def text(page: str) -> str:
    return (DOCS / page).read_text()


def run_blocks(blocks: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Run blocks of code one after the other, as a reader would, in a folder of their own."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MPLBACKEND", "agg")
    (folder / "blocks.py").write_text("\n".join(blocks))
    return runpy.run_path(str(folder / "blocks.py"))


@pytest.mark.parametrize("page", PAGES_WITH_CODE)
def test_the_code_on_a_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)
    assert blocks
    run_blocks(blocks, tmp_path, monkeypatch)


def section(page: str, title: str) -> str:
    return text(page).split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_the_pages_deny_nothing_that_there_is() -> None:
    """Averages, privacy, compiled steps on a GPU, and scores of sites: each has its keys where a page speaks of it."""
    averages = get_args(Experiment.model_fields["train"].annotation.model_fields["aggregate"].annotation)
    assert [name for name in averages if f"`{name}`" not in section("idea.md", "The server")] == []
    assert "`privacy.clip`" in section("faq.md", "Privacy")
    assert '`runtime.engine = "compiled"`' in section("faq.md", "GPU")
    assert "`data.validation" in section("tasks.md", "Engines, sites and limits")


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # its cells are plain Python: a kernel (37 packages, 105 MB) would add nothing but a process
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    run_blocks(["".join(cell["source"]) for cell in cells], tmp_path, monkeypatch)


def test_the_notebook_is_kept_without_its_outputs() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None]


def test_the_notebook_installs_the_library_before_it_is_imported() -> None:
    cells = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"]]
    code = [cell for cell in cells if "import" in cell]
    assert '"pip", "install", "--quiet", "fedpews"' in code[0]
    assert "import fedpews" not in code[0]


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert project["version"] == fedpews.__version__
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [fedpews.__version__]
    assert re.findall(r"version = \{(.+)\}", text("cite.md")) == [fedpews.__version__]
    assert f"\n## [{fedpews.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()


def test_the_citations_name_the_same_paper() -> None:
    citation, page = (ROOT / "CITATION.cff").read_text(), text("cite.md")
    (title,) = re.findall(r'preferred-citation:.*?title: "(.+?)"', citation, re.DOTALL)
    assert title in page.replace("{", "").replace("}", "")
    assert re.findall(r'^  url: "(.+)"$', citation, re.MULTILINE) == re.findall(r"url +=\W+(.+)\}", page)


def test_every_action_of_the_workflows_is_pinned_to_a_version() -> None:
    workflows = "\n".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    actions = re.findall(r"uses: (\S+)", workflows)
    assert actions
    assert [action for action in actions if not re.search(r"@v\d+\.\d+\.\d+$", action)] == []


def markdown_files() -> list[Path]:
    files = [*ROOT.glob("*.md"), *ROOT.glob(".github/*.md")]
    return files + [path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md")]


def test_every_file_that_a_page_links_to_exists() -> None:
    missing = []
    for page in markdown_files():
        prose = re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            file = unquote(link.partition("#")[0])
            if file and not re.match(r"[a-z]+:", file) and not (page.parent / file).exists():
                missing.append(f"{page.relative_to(ROOT)}: {link}")
    assert not missing


def test_every_python_file_that_a_page_names_exists() -> None:
    ours = [
        path.as_posix()
        for folder in ("src", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in markdown_files()
        for name in re.findall(r"`([a-z_/-]+\.py)`", page.read_text())
        if name not in ("mine.py", "docs/pictures/gallery.py")
        and not any(path.endswith(f"/{name}") for path in ours)
    ]
    assert not missing


def test_the_generated_parts_are_in_step_with_the_code() -> None:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    stale = [path.name for path, page in generate.pages().items() if page != path.read_text()]
    assert not stale, "run make docs"


def test_every_public_name_is_in_the_reference() -> None:
    shown = re.findall(r"^::: fedpews\.(\w+)$", text("reference/api.md"), re.MULTILINE)
    assert sorted(shown) == sorted(fedpews.__all__)


def test_every_command_is_in_the_reference() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    page = text("reference/command-line.md")
    assert not [name for name in commands if f"`fedpews {name}" not in page]


def test_every_exit_code_is_in_the_reference() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.__name__: kind.exit_code for kind in kinds if issubclass(kind, errors.FedpewsError)}
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text("reference/command-line.md"), re.MULTILINE)
    assert {name: int(code) for code, name in rows} == codes


class Links(HTMLParser):
    """What a page links to, what it loads by itself, and the places one can link to in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.places: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.places |= {values[name] for name in ("id", "name") if name in values}
        if "src" in values:
            self.loads.add(values["src"])
        if "href" in values:
            (self.links if tag == "a" else self.loads).add(values["href"])


@pytest.fixture(scope="module")
def site() -> Iterator[dict[Path, Links]]:
    """The built site, page by page."""
    pytest.importorskip("zensical", reason="the site needs pip install -e '.[docs]'")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    folder = ROOT / "build" / "site"
    folder.parent.mkdir(exist_ok=True)
    # test processes side by side build into the same folder, and read it until their tests are done
    with FileLock(folder.parent / "site.lock"):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        yield {path: Links(path.read_text()) for path in folder.rglob("*.html")}


def test_no_link_of_the_site_is_broken(site: dict[Path, Links]) -> None:
    broken = []
    for path, page in site.items():
        if path.name == "404.html":
            continue
        for link in (*page.links, *page.loads):
            file, _, place = unquote(link).partition("#")
            if re.match(r"[a-z]+:", file):
                continue
            target = (path.parent / file).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (place and target in site and place not in site[target].places):
                broken.append(f"{path.name}: {link}")
    assert len(site) > 20
    assert not broken


def test_no_page_of_the_site_asks_for_anything_from_elsewhere(site: dict[Path, Links]) -> None:
    foreign = {load for page in site.values() for load in page.loads if re.match(r"(https?:)?//", load)}
    assert not foreign


def test_the_reference_shows_what_the_docstrings_say(site: dict[Path, Links]) -> None:
    page = (ROOT / "build" / "site" / "reference" / "api.html").read_text()
    assert "Run an experiment and return its rounds, summary and models." in page
    assert not [name for name in fedpews.__all__ if f'id="fedpews.{name}"' not in page]
