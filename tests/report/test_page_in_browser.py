"""The page as people meet it: in a real browser, at several sizes, by mouse and by keyboard."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_runs import HOSTILE, federation, tiny

from fedpews.callbacks import Callback
from fedpews.errors import Interrupted
from fedpews.report.html import HOST, serve, write_report
from fedpews.running import run

Open = Callable[..., Any]


@pytest.fixture
def look(browser: Any) -> Iterator[Open]:
    """Opens a page; in the end nothing may have gone wrong in it, and no request may have left."""
    pages: list[Any] = []
    wrong: list[str] = []

    def open_page(address: str | Path, width: int = 1280, height: int = 800, scheme: str = "light") -> Any:
        # without smooth scrolling: a chart that still moves slides away under the mouse
        page = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
        )
        page.set_default_timeout(120_000)
        own = address.as_uri() if isinstance(address, Path) else address
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request",
            lambda request: None if request.url.startswith(own) else wrong.append(f"request: {request.url}"),
        )
        page.goto(own)
        page.wait_for_selector("#sentence h1")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert wrong == []


@pytest.fixture(scope="module")
def report(runs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([runs_folder], tmp_path_factory.mktemp("page") / "report.html")


def wait_for(element: Any, text: str) -> None:
    from playwright.sync_api import expect

    expect(element).to_contain_text(text, timeout=120_000)


def plot_of(page: Any, title: str) -> Any:
    card = page.locator("figure.card", has=page.get_by_role("heading", name=title, exact=True))
    return card.locator(".plot")


def point_at(page: Any, plot: Any, part: float) -> None:
    plot.scroll_into_view_if_needed()
    # scrolling hides the tip, and the browser tells of it with the next frame
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    box = plot.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + part * box["width"], box["y"] + box["height"] / 2)
    page.locator("#tip").wait_for(state="visible")


def test_the_numbers_on_the_page_are_those_of_summary_json(
    look: Open, report: Path, runs_folder: Path
) -> None:
    page = look(report)

    rows = page.locator("#numbers tbody tr").all_inner_texts()

    for method, row in zip(("fedavg", "fedavg+pews"), rows, strict=True):
        summary = json.loads((runs_folder / method / "summary.json").read_text())
        final, totals = summary["final_accuracy"], summary["totals"]
        cells = [cell.strip() for cell in row.split("\t")]
        assert cells[0] == method
        assert cells[1] == f"{100 * final['mean']:.2f} ± {100 * final['std']:.2f}"
        assert cells[3] == f"{summary['rounds_to_target']['reached']}/3"
        assert cells[4:6] == [f"{totals['bytes_up'] / 1e6:.1f}", f"{totals['bytes_down'] / 1e6:.1f}"]


def test_the_first_sentence_of_three_seeds_says_that_they_are_too_few(look: Open, report: Path) -> None:
    page = look(report)

    sentence = page.locator("#sentence h1").inner_text()

    assert sentence.startswith("3 seeds are too few to tell: fedavg+pews ")
    assert " points against fedavg, between " in sentence
    assert page.locator("#picture svg circle").count() == 3  # a dot for each seed


def test_on_a_phone_no_number_of_a_run_is_cut_and_each_has_its_name(look: Open, report: Path) -> None:
    page = look(report, width=360)

    table = page.locator("#numbers .scroll")

    assert table.evaluate("e => e.scrollWidth <= e.clientWidth")
    heads = table.locator("td").evaluate_all("all => all.map(e => getComputedStyle(e, '::before').content)")
    assert heads[:2] == ['"final %"', '"rounds to 40 %"']


def test_runs_with_equal_values_have_dots_of_their_own(look: Open, report: Path) -> None:
    page = look(report)
    page.evaluate("doc.now.runs.forEach((run) => run.clients.final.fill(0.5)); redrawAll()")

    dots = page.locator("#client-charts circle").evaluate_all(
        "all => all.map(e => [e.getAttribute('cx'), e.getAttribute('cy')].join())"
    )

    assert len(dots) == len(set(dots)) == 6  # two runs, three clients
    assert "100 %" in page.locator("#client-charts figure svg text").all_text_contents()


def test_the_end_of_the_warmup_is_written_above_the_curves(look: Open, report: Path) -> None:
    page = look(report)

    heights = page.evaluate(
        """() => {
          const write = CanvasRenderingContext2D.prototype.fillText, seen = [];
          CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
            if (text === "warmup ends") seen.push(y / devicePixelRatio);
            return write.call(this, text, x, y);
          };
          redrawAll();
          return new Promise((done) => setTimeout(() => done(seen)));
        }"""
    )

    assert heights
    assert max(heights) < 24  # the padding above a plot


def test_a_layers_header_is_its_name_where_there_is_room_and_else_its_number_never_cut(
    look: Open, report: Path
) -> None:
    page = look(report)

    shown = page.evaluate(
        "[150, 60, 10, 4].map((room) => header({ name: '3.conv1' }, 2, room, (t) => 7 * t.length))"
    )

    assert shown == ["layer 3 (3.conv1)", "layer 3", "3", ""]
    assert "starts at random" in page.locator("#mask-view").inner_text()


def test_the_classes_fill_their_card_with_a_row_for_each_client(look: Open, report: Path) -> None:
    page = look(report)
    card = page.locator("#split figure")

    drawn = card.locator("svg").bounding_box()
    rows = card.locator("circle").evaluate_all("all => all.map(e => e.getAttribute('cy'))")

    assert drawn["width"] > 0.9 * card.bounding_box()["width"] - 38
    assert len(rows) == len(set(rows)) == 3  # three clients with a class each


def test_the_slider_changes_the_masks_and_says_the_round(look: Open, report: Path, runs_folder: Path) -> None:
    page = look(report)
    page.locator("#masks").scroll_into_view_if_needed()

    def seen() -> str:
        return str(page.evaluate("document.getElementById('mask-pixels').toDataURL()"))

    last, words = seen(), page.locator("#mask-facts").inner_text()
    page.locator("#mask-round").focus()
    page.keyboard.press("Home")

    assert seen() != last
    assert "round 4" in words
    assert "round 1" in page.locator("#mask-facts").inner_text()
    page.keyboard.press("End")
    assert seen() == last


def test_the_owned_neurons_in_the_masks_table_are_those_the_run_saved(
    look: Open, report: Path, runs_folder: Path
) -> None:
    from safetensors.numpy import load_file

    page = look(report)
    card = page.locator("figure.card", has=page.locator("#mask-pixels"))
    card.locator("summary").click()
    card.locator("tbody tr").first.wait_for(state="visible")

    rows = [row.split("\t") for row in card.locator("tbody tr").all_inner_texts()]

    masks = load_file(runs_folder / "fedavg+pews" / "masks-0.safetensors")
    expected = [
        [name, str(masks[f"client-{i}"][:6].sum()), str(masks[f"client-{i}"][6:].sum())]
        for i, name in enumerate(("Oslo", "Lima", "Pune"))
    ]
    assert [[cell.strip() for cell in row] for row in rows] == expected


def test_hovering_shows_every_series_at_that_round(look: Open, report: Path) -> None:
    page = look(report)

    point_at(page, plot_of(page, "Accuracy"), 0.6)

    wait_for(page.locator("#tip b"), "round 4")  # 1 + 0.6 · 5
    assert page.locator("#tip tr").count() == 2


def test_a_value_shown_is_the_mean_of_the_seeds_in_rounds_jsonl(
    look: Open, report: Path, runs_folder: Path
) -> None:
    page = look(report)

    point_at(page, plot_of(page, "Accuracy"), 0.6)

    lines = (runs_folder / "fedavg" / "rounds.jsonl").read_text().splitlines()
    values = [100 * r["accuracy"] for r in map(json.loads, lines) if r["round"] == 4]
    mean = sum(values) / 3
    wait_for(page.locator("#tip b"), "round 4")
    shown = page.locator("#tip tr").first.inner_text()
    assert float(shown.split("\t")[1].split(" ")[0]) == pytest.approx(mean, abs=0.051)


def test_the_legend_hides_a_run_everywhere(look: Open, report: Path) -> None:
    page = look(report)

    page.locator(".legend button", has_text="fedavg+pews").click()
    point_at(page, plot_of(page, "Test loss"), 0.5)

    assert page.locator("#tip tr").count() == 1
    pressed = page.locator(".legend button", has_text="fedavg+pews").get_attribute("aria-pressed")
    assert pressed == "false"


def test_dragging_zooms_all_charts_and_a_button_shows_all_again(look: Open, report: Path) -> None:
    page = look(report)
    plot = plot_of(page, "Accuracy")
    point_at(page, plot, 0.2)
    page.mouse.down()
    point_at(page, plot, 0.4)
    point_at(page, plot, 0.65)  # 1 + 0.65 · 5: past round 4
    page.mouse.up()

    assert page.locator("#unzoom").is_visible()
    point_at(page, plot_of(page, "Training loss"), 0.999)
    wait_for(page.locator("#tip b"), "round 4")
    page.locator("#unzoom").click()
    point_at(page, plot_of(page, "Training loss"), 0.999)
    wait_for(page.locator("#tip b"), "round 6")


def test_the_keyboard_reads_values_and_zooms(look: Open, report: Path) -> None:
    page = look(report)
    plot = plot_of(page, "Accuracy")
    plot.focus()

    page.keyboard.press("End")
    wait_for(page.locator("#tip b"), "round 6")
    page.keyboard.press("ArrowLeft")
    wait_for(page.locator("#tip b"), "round 5")
    wait_for(page.locator("#said"), "round 5: fedavg ")
    page.keyboard.press("+")
    assert page.locator("#unzoom").is_visible()
    page.keyboard.press("0")
    assert page.locator("#unzoom").is_hidden()


def test_everything_that_can_be_used_can_be_reached_with_tab(look: Open, report: Path) -> None:
    page = look(report)
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
            )
        )

    assert {"skip", "theme", "plot", "mask-round", "mask-pixels"} <= {
        str(name).split(" ")[0] for name in reached
    }


def test_over_bytes_the_curves_end_at_what_was_sent(look: Open, report: Path, runs_folder: Path) -> None:
    page = look(report)

    page.get_by_role("radio", name="bytes").check()
    point_at(page, plot_of(page, "Accuracy"), 0.999)

    totals = json.loads((runs_folder / "fedavg" / "summary.json").read_text())["totals"]
    shown = page.locator("#tip b").inner_text()
    megabytes = (totals["bytes_up"] + totals["bytes_down"]) / 3 / 1e6
    assert shown.endswith(" MB")
    assert float(shown.split(" ")[0]) == pytest.approx(megabytes, rel=0.1)


def test_dark_mode_follows_the_system_and_the_button(look: Open, report: Path) -> None:
    page = look(report, scheme="dark")

    def ground() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    assert ground() == "rgb(15, 18, 22)"
    page.locator("#theme").click()
    assert ground() == "rgb(251, 251, 250)"


def contrast(a: str, b: str) -> float:
    """Of two colours such as #0072b2, as WCAG 2 has it: 1 to 21."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out_from_their_ground(look: Open, report: Path, scheme: str) -> None:
    page = look(report, scheme=scheme)

    found = page.evaluate(
        """() => {
          const value = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
          return { ground: value("--card"), text: [value("--ink"), value("--muted")], lines: doc.now.runs.map(tint) };
        }"""
    )
    ratios = {key: [contrast(one, found["ground"]) for one in found[key]] for key in ("text", "lines")}

    assert min(ratios["text"]) >= 4.5  # WCAG AA for text
    assert min(ratios["lines"]) >= 3  # and for graphics


@pytest.mark.parametrize("width", [360, 768, 1280, 3840])
def test_no_width_makes_the_page_scroll_sideways(look: Open, report: Path, width: int) -> None:
    page = look(report, width=width)

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#mask-pixels").bounding_box()["width"] <= width


def test_every_chart_has_its_numbers_behind_it(look: Open, report: Path) -> None:
    page = look(report)

    tables = page.locator("details.data")
    for index in range(tables.count()):
        tables.nth(index).locator("summary").click()

    assert tables.count() >= 10
    assert all(tables.nth(index).locator("tbody tr").count() for index in range(tables.count()))


def test_every_picture_and_control_has_a_name_for_screen_readers(look: Open, report: Path) -> None:
    page = look(report)

    nameless = page.evaluate(
        """() => {
          const all = document.querySelectorAll("[role=img], .plot, button, select, input, [role=region]");
          const named = (e) => e.getAttribute("aria-label") || e.textContent.trim() || e.closest("label");
          return [...all].filter((e) => !named(e)).map((e) => e.outerHTML);
        }"""
    )

    assert nameless == []
    assert page.locator("h1").count() == 1


def test_on_paper_there_are_no_controls_and_the_ground_is_white(look: Open, report: Path) -> None:
    page = look(report)
    page.emulate_media(media="print")

    assert page.locator("#toolbar").is_hidden()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_hostile_names_stay_text(look: Open, hostile_folder: Path, tmp_path: Path) -> None:
    page = look(write_report([hostile_folder], tmp_path / "report.html"))

    assert page.locator("#bad").count() == 0
    assert page.locator("img").count() == 0
    assert page.evaluate("document.scripts.length") == 2
    assert page.locator(".legend button").inner_text() == "<b id=bad>fed</b>{{ script }}"
    names = page.locator("#client-charts select option").all_inner_texts()
    assert names == [HOSTILE, "$$x$$", "{{ data }}"]
    assert "a<b>&$$" in page.locator("#config .again pre").inner_text()


def test_a_watched_run_shows_new_rounds_by_itself(look: Open, tmp_path: Path) -> None:
    def stop(records: Any) -> None:
        if records[0]["round"] == 3:
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        run(tiny(), clients=federation(), out=tmp_path / "run", callbacks=[Callback(round=stop)])
    server = serve([tmp_path])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page = look(f"http://{HOST}:{server.server_port}/")
        assert page.locator("#status").inner_text() == "fedavg+pews round 3 of 6"
        assert "after round 3 of 6" in page.locator("#sentence h1").inner_text()
        run(tiny(), clients=federation(), out=tmp_path / "run", resume=True)
        wait_for(page.locator("#status"), "finished")
        assert "fedavg+pews ends at" in page.locator("#sentence h1").inner_text()
        assert page.locator("output[for=mask-round]").inner_text() == "4 of 4"
        page.goto("about:blank")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_no_fault_for_people_with_disabilities(
    look: Open, report: Path, width: int, scheme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = look(report, width=width, scheme=scheme)
    found = Axe().run(page).response
    assert len(found["passes"]) > 30  # it has really looked
    assert [(fault["id"], fault["nodes"][0]["target"]) for fault in found["violations"]] == []
