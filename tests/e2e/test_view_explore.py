"""The exploring pages, by a browser: a query, a moved threshold, a drop looked at, two versions, a narrow screen."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from mm_assets.pipeline.state.folder import DatasetStore

from ..pipeline.chain import declare, run_chain
from ..pipeline.explore.test_diff import again
from ..pipeline.shards import make_shard, png
from .browser import PATIENCE, needs_browser, until
from .warm import WarmCommands

SCREENSHOTS = Path(__file__).resolve().parents[2] / "artifacts"

pytestmark = needs_browser

HOSTILE = "<img src=x onerror=alert(1)>"
RTL = "שלום"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetStore:
    """Two versions of image-text samples with markup as text; the second has no narrow images and another caption."""
    folder = tmp_path_factory.mktemp("explored")
    for key, widths in {"a": range(4, 44, 2), "b": range(30, 90, 5)}.items():
        members: dict[str, object] = {".hidden": b"not a sample"}
        for n, width in enumerate(widths):
            name = f"{key}{n:02}{RTL if n in (1, 8) else ''}"
            members[f"{name}.png"] = png(width, (24, width))
            members[f"{name}.txt"] = f"{RTL if n == 8 else ''} caption {name} {HOSTILE}".lstrip()
            members[f"{name}.json"] = {"title": f"{HOSTILE} {n}", "grade": n / 4, RTL: [RTL]}
        make_shard(folder / "in" / f"{key}.tar", members)
    rule = {"type": "image_size", "scope": "sample"}
    spec = declare(
        folder / "root", folder / "in", annotators=[{"type": "image_size"}], filters=[{**rule, "min_width": 2}]
    )
    run_chain(spec)
    make_shard(folder / "in" / "b.tar", {**members, "b03.txt": f"another caption {HOSTILE}"})
    stricter = DatasetStore(spec.replace(filters=({**rule, "min_width": 12},)))
    again(stricter)
    return stricter


@pytest.fixture(scope="module")
def url(dataset: DatasetStore, warm_commands: WarmCommands) -> Iterator[str]:
    """The viewer over the dataset, as its command starts it."""
    with warm_commands.running(["view", dataset.store.url], cwd=Path.cwd(), env=os.environ) as server:
        yield server.first_line()


@pytest.fixture(params=[1280])
def page(request: pytest.FixtureRequest, browser: Any, url: str) -> Iterator[Any]:
    """A page with the token; nothing may be written to its console as an error, no dialog may open."""
    context = browser.new_context(viewport={"width": request.param, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE)
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("dialog", lambda dialog: (said.append(f"dialog {dialog.message}"), dialog.dismiss()))
    opened.goto(url)
    opened.get_by_role("link", name="SQL", exact=True).wait_for()
    yield opened
    context.close()
    assert said == []


def root_of(url: str) -> str:
    return url.partition("/?")[0]


def test_a_query_is_run_and_its_row_opens_a_sample(page: Any, url: str) -> None:
    """Ctrl+Enter runs the text, the URL has it, a row opens its sample, Esc or going back shows the result again."""
    page.get_by_role("link", name="SQL", exact=True).click()
    editor = page.get_by_label("SQL (DuckDB)")
    editor.fill("select partition, sample_id, image_width from filtered_rows\nwhere image_width > 80")
    editor.press("Control+Enter")
    page.get_by_text("1 row in").first.wait_for()
    assert "page=sql" in page.url
    assert "image_width" in page.url
    page.get_by_role("link", name="Open sample b11").click()
    page.get_by_role("heading", name="b11").wait_for()
    assert "part=b" in page.url
    assert "n=11" in page.url
    page.get_by_text("Where it came from").click()
    page.get_by_role("cell", name="b11.png").wait_for()
    page.get_by_role("button", name="Read image 0 and compute its checksums").click()
    page.get_by_text("SHA-256").last.wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Open sample b11").wait_for()
    page.go_back()
    page.get_by_role("link", name="↑ Back").wait_for()
    page.go_back()
    page.get_by_role("link", name="Open sample b11").wait_for()
    assert "image_width > 80" in page.get_by_label("SQL (DuckDB)").input_value()


def test_a_wrong_query_says_where(page: Any, url: str) -> None:
    """An error names line and column in words, shows the place, and marks it in the text."""
    page.goto(f"{root_of(url)}/?page=sql")
    editor = page.get_by_label("SQL (DuckDB)")
    editor.fill("select 1,\n  nothing from rows")
    editor.press("Control+Enter")
    page.get_by_role("alert").get_by_text("Line 2, column 3").wait_for()
    marked = editor.evaluate("e => e.value.slice(e.selectionStart, e.selectionEnd)")
    assert marked == "nothing"
    editor.fill("select * from read_csv('/etc/passwd')")
    editor.press("Control+Enter")
    page.get_by_role("alert").get_by_text("is not allowed").wait_for()


def test_a_running_query_is_cancelled(page: Any, url: str) -> None:
    """The button ends a query that would run for ever."""
    page.goto(f"{root_of(url)}/?page=sql")
    page.get_by_label("SQL (DuckDB)").fill("select max(a.position + b.range) from rows a, range(100000000000) b")
    page.get_by_role("button", name="Run").click()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("alert").get_by_text("cancelled").wait_for()


def test_values_in_a_result_are_text(page: Any, url: str) -> None:
    """Markup in a column is shown and not run."""
    page.goto(f"{root_of(url)}/?page=sql")
    page.get_by_label("SQL (DuckDB)").fill("select title from rows where title is not null order by title limit 1")
    page.get_by_role("button", name="Run").click()
    page.get_by_role("cell", name=HOSTILE).first.wait_for()
    assert page.locator("main img").count() == 0


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (20, 60.5),
        (1, 1e6),
        (-1000, 5),
        pytest.param(12, 85, marks=pytest.mark.slow),
        pytest.param(90, 3, marks=pytest.mark.slow),
    ],
)
def test_a_threshold_is_at_its_place_on_the_axis(page: Any, url: str, low: float, high: float) -> None:
    """Each handle is where the axis's labels have its value, also of a limit below or above all values."""
    page.goto(f"{root_of(url)}/?page=scores&score=image_width&at_least={low}&at_most={high}")
    page.get_by_role("slider", name="Smallest kept").wait_for()
    ticks = page.evaluate(
        """[...document.querySelectorAll('.x-tick[text-anchor]')].map((tick) =>
            [Number(tick.textContent.replaceAll(',', '')), Number(tick.getAttribute('x'))])"""
    )
    values, places = zip(*ticks, strict=True)
    assert list(values) == sorted(values)
    for name, limit in (("Smallest kept", low), ("Largest kept", high)):
        moved = page.get_by_role("slider", name=name).get_attribute("transform")
        assert float(re.findall(r"[\d.]+", moved)[0]) == pytest.approx(np.interp(limit, values, places), abs=0.5)


def test_texts_have_the_direction_of_their_letters(page: Any, url: str) -> None:
    """Ids, texts, JSON, cells and reasons in Hebrew or Arabic are in elements whose direction is automatic."""
    for place in (
        "",
        "?n=0",
        "?page=filter&relation=rows",
        f"?page=sql&sql={quote('from filtered_rows')}",
        "?page=drops",
    ):
        page.goto(f"{root_of(url)}/{place}")
        until(page, f"/{RTL[0]}/.test(document.getElementById('main').innerText)")
        wrong = page.evaluate(
            """() => {
                const found = [], main = document.getElementById('main');
                const walker = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
                while (walker.nextNode()) {
                    const { data, parentElement } = walker.currentNode;
                    const isRight = !/[\u0590-\u06ff]/.test(data) || parentElement.dir === 'auto';
                    if (!isRight) found.push(parentElement.outerHTML);
                }
                return found;
            }"""
        )
        assert wrong == [], place


def test_cards_of_dropped_rows_have_the_whole_reason(page: Any, url: str) -> None:
    """The reason is not shortened where rows are dropped, and a sample that is not packed says which it was."""
    page.goto(f"{root_of(url)}/?page=drops")
    page.locator(".x-why").first.wait_for()
    assert page.evaluate("[...document.querySelectorAll('.x-why')].every((one) => one.scrollWidth <= one.clientWidth)")
    assert page.locator(".x-why").first.inner_text() == "image_size: width_below_min"
    page.goto(f"{root_of(url)}/?page=filter&relation=rows")
    page.get_by_text("not packed: image_size.width_below_min").first.wait_for()


def test_a_threshold_is_moved_by_keys_and_pointer(page: Any, url: str) -> None:
    """The line follows arrow keys, a typed number and the pointer, and the count beside it is exact."""
    page.get_by_role("link", name="Scores", exact=True).click()
    line = page.get_by_role("slider", name="Smallest kept")
    line.wait_for()
    assert line.get_attribute("aria-valuenow") == "12"
    said = page.locator(".x-said")
    said.get_by_text("would keep 28 of 32").wait_for()
    line.focus()
    page.keyboard.press("ArrowRight")
    assert float(line.get_attribute("aria-valuenow")) > 12
    page.locator("#at_least").fill("60")
    said.get_by_text("would keep 6 of 32").wait_for()
    assert line.get_attribute("aria-valuenow") == "60"
    assert "at_least=60" in page.url
    box = line.locator("line").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] - 150, box["y"] + box["height"] / 2, steps=6)
    page.mouse.up()
    value = float(line.get_attribute("aria-valuenow"))
    assert value < 60
    until(page, "document.querySelector('.x-said').dataset.kept > 6")
    page.reload()
    page.get_by_role("slider", name="Smallest kept").wait_for()
    assert float(page.get_by_role("slider", name="Smallest kept").get_attribute("aria-valuenow")) == value
    page.get_by_role("button", name="As it is").click()
    said.get_by_text("would keep 28 of 32").wait_for()
    SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "explore-scores.png")


def test_a_drop_is_looked_at(page: Any, url: str) -> None:
    """A card shows the dropped picture, the filter, the measure and the limit; it opens the picture and its origin."""
    page.get_by_role("link", name="Drops", exact=True).click()
    card = page.locator(".card").filter(has_text="image_size: width_below_min").first
    card.wait_for()
    assert "4, min_width is 12" in card.inner_text()
    assert "image 0" in card.inner_text()
    page.get_by_text("12 items of 4 samples").first.wait_for()
    picture = card.locator("img")
    picture.scroll_into_view_if_needed()
    until(page, "[...document.querySelectorAll('.card img')].some((one) => one.naturalWidth > 0)")
    page.screenshot(path=SCREENSHOTS / "explore-drops.png")
    card.click()
    page.locator(".x-content img, .x-content canvas").first.wait_for()
    page.get_by_text("dropped: image_size.width_below_min").first.wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("12 items of 4 samples").first.wait_for()
    page.go_forward()
    page.get_by_role("link", name="Its sample, if it is packed").click()
    page.get_by_role("heading", name="a00").wait_for()
    page.get_by_text("It is not packed.").wait_for()
    assert "page=origin" in page.url
    page.goto(f"{root_of(url)}/?page=drops")
    page.get_by_label("Reason").select_option(label="hidden file (2)")
    page.locator(".card").filter(has_text="hidden file").first.click()
    page.get_by_text("not a sample").wait_for()


def test_the_grid_is_filtered_and_ordered(page: Any, url: str) -> None:
    """A condition and an order give cards with the value; a card opens its sample by the keyboard."""
    page.get_by_role("link", name="Filter", exact=True).click()
    page.get_by_label("Condition (SQL)").fill("image_width >= 70")
    page.get_by_label("Condition (SQL)").press("Enter")
    page.locator(".card").nth(3).wait_for()
    page.get_by_label("Order by").select_option("image_width")
    page.wait_for_url(re.compile("order=image_width"))
    page.get_by_label("Direction").select_option("desc")
    first = page.locator(".card").first
    first.filter(has_text="image_width: 85").wait_for()
    page.screenshot(path=SCREENSHOTS / "explore-filter.png")
    first.focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="b11").wait_for()
    page.goto(f"{root_of(url)}/?page=filter&where=nothing+%3E+1")
    page.get_by_role("alert").get_by_text("nothing").first.wait_for()


def test_two_versions_are_compared(page: Any, url: str) -> None:
    """The settings that changed, the partition and its samples are shown; a removed sample leads to where it was."""
    page.get_by_role("link", name="Versions", exact=True).click()
    page.get_by_text("filtered_rows: filters.image_size.min_width: 2 -> 12").first.wait_for()
    page.get_by_text("0 added, 4 removed, 1 changed").first.wait_for()
    page.get_by_role("button", name="▸ a").click()
    page.get_by_text("image_size.width_below_min, measured 4").wait_for()
    page.screenshot(path=SCREENSHOTS / "explore-versions.png")
    page.get_by_role("link", name="a00", exact=True).click()
    page.get_by_text("dropped: image_size.width_below_min").first.wait_for()


@pytest.mark.parametrize("page", [400, 1280], indirect=True)
def test_a_sample_that_changed_is_shown_side_by_side(page: Any, url: str) -> None:
    """A change leads to both contents by modality, beside each other where there is room; so does a removal."""
    page.goto(f"{root_of(url)}/?page=versions")
    page.get_by_role("button", name="▸ b").click()
    page.get_by_role("link", name="b03", exact=True).click()
    page.get_by_text("1 differs").first.wait_for()
    until(page, "document.querySelectorAll('.x-pair-differs .item .body > *').length === 2")
    old, new = page.locator(".x-pair-differs .item").all()
    assert "caption b03" in old.inner_text()
    assert "another caption" in new.inner_text()
    side, other = old.bounding_box(), new.bounding_box()
    if page.viewport_size["width"] == 400:
        assert other["y"] >= side["y"] + side["height"]
    else:
        assert (other["y"], other["x"] > side["x"]) == (side["y"], True)
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    page.locator(".x-pair-same summary").first.focus()
    page.keyboard.press("Enter")
    until(page, "[...document.querySelectorAll('.x-pair-same img')].filter((one) => one.naturalWidth).length === 2")
    page.screenshot(path=SCREENSHOTS / f"explore-compare-{page.viewport_size['width']}.png", full_page=True)
    page.get_by_role("link", name="↑ Versions").click()
    page.get_by_role("button", name="▸ a").click()
    page.get_by_role("link", name="What a00 was").click()
    page.get_by_text("does not have the sample").wait_for()
    page.get_by_text("Not in the new version.").first.wait_for()


def test_a_place_leads_to_its_sample(page: Any, url: str) -> None:
    """The name of a shard and a member give the rows that came from there."""
    page.get_by_role("link", name="Origin", exact=True).click()
    page.get_by_label("Shard").fill("b.tar")
    page.get_by_label("Member").fill("b03.png")
    page.get_by_role("button", name="Find samples").click()
    page.get_by_role("link", name="b03").first.click()
    page.get_by_role("heading", name="b03").wait_for()


@pytest.mark.parametrize("page", [400], indirect=True)
@pytest.mark.parametrize("name", ["filter", "sql", "drops", "scores", "partitions", "versions", "origin"])
def test_pages_fit_a_narrow_screen(page: Any, url: str, name: str) -> None:
    """At 400 px nothing is wider than the screen, and every control has a name."""
    page.goto(f"{root_of(url)}/?page={name}")
    until(page, "document.querySelector('main').textContent.length > 20 && !document.querySelector('[aria-busy]')")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    nameless = page.evaluate(
        "[...document.querySelectorAll('main button, main a, main input, main select, main textarea')].filter((one) => "
        "!one.textContent.trim() && !one.getAttribute('aria-label') && !one.labels?.length).map((one) => one.outerHTML)"
    )
    assert nameless == []
    page.screenshot(path=SCREENSHOTS / f"explore-400-{name}.png", full_page=True)
