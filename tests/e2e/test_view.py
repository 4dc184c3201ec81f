"""The viewer by a browser: the grid, samples, the keyboard, a narrow screen, sound and video that are sought."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mm_assets
from mm_assets.fields import ImageField, TextField

from ..pipeline.chain import declare, run_chain
from .browser import PATIENCE, needs_browser, until

COMMAND = [sys.executable, "-c", "from mm_assets.cli.main import main; main()", "view"]
HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"


@contextmanager
def viewer(*locations: Path | str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command over some locations: its URL and its process."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, locations)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            assert process.stderr is not None
            pytest.fail(process.stderr.read())
        yield url, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MULT file of 130 samples with hostile ids and captions; every second has a picture."""
    import numpy as np

    path = tmp_path_factory.mktemp("packed") / "pairs.mult"
    with mm_assets.create(path, {"image": ImageField(encoding="png"), "caption": TextField()}) as writer:
        for n in range(130):
            image = np.full((30, 40, 3), n, np.uint8) if n % 2 == 0 else None
            writer.write(f"id-{n:03} {HOSTILE}", {"image": image, "caption": f"caption {n} {HOSTILE}"})
    return path


def focused_index(page: Any) -> str | None:
    found: str | None = page.evaluate("document.activeElement?.dataset?.index ?? null")
    return found


@needs_browser
@pytest.mark.parametrize("width", [400, pytest.param(1400, marks=pytest.mark.slow)])
def test_the_grid_is_sorted_and_filtered(packed: Path, browse: Callable[..., Any], width: int) -> None:
    """The grid's control sorts, a condition is added, the URL has both, and a sample returns there."""
    page = browse(packed, width)
    page.locator(".card").nth(49).wait_for()
    before = page.locator(".grid").bounding_box()["y"]
    control = page.get_by_label("Sort by")
    until(page, "document.querySelector('.x-sort').options.length > 5")
    assert page.locator(".grid").bounding_box()["y"] == before
    control.select_option("index")
    page.locator(".x-value", has_text="index: 0").wait_for()
    page.get_by_label("Direction").select_option("desc")
    page.locator(".card").first.get_by_text("index: 129").wait_for()
    page.get_by_label("Condition").fill("present_image and index < 100")
    page.keyboard.press("Enter")
    page.locator(".card").first.get_by_text("index: 98").wait_for()
    until(page, "document.querySelector('.card img')?.naturalWidth > 0")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator(".card").first.click()
    page.get_by_role("heading", name="id-098").wait_for()
    page.keyboard.press("Escape")
    page.locator(".card").first.get_by_text("index: 98").wait_for()
    assert "where=present_image" in page.url
    assert focused_index(page) == "98"
    page.reload()
    page.locator(".card").first.get_by_text("index: 98").wait_for()
    page.get_by_label("Condition").fill("no_such > 1")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("no_such").first.wait_for()


@needs_browser
def test_samples_follow_each_other_as_their_list_does(packed: Path, browse: Callable[..., Any]) -> None:
    """Arrows follow the sorted order, over its page's end, and what a search found; Esc returns there, and to all."""
    page = browse(packed)
    page.get_by_label("Sort by").select_option("index")
    page.get_by_label("Direction").select_option("desc")
    page.locator(".card").first.get_by_text("index: 129").wait_for()
    page.locator(".card").last.click()
    page.get_by_role("heading", name="id-080").wait_for()
    page.get_by_text("#80, in the list's order").wait_for()
    page.get_by_role("link", name="Next →").wait_for()
    for key, name in [
        ("ArrowRight", "id-079"),
        ("ArrowRight", "id-078"),
        ("ArrowLeft", "id-079"),
        ("ArrowLeft", "id-080"),
    ]:
        page.get_by_role("link", name="← Previous").wait_for()
        page.keyboard.press(key)
        page.get_by_role("heading", name=name).wait_for()
    page.get_by_role("link", name="Next →").click()
    page.get_by_role("heading", name="id-079").wait_for()
    page.keyboard.press("Escape")
    page.locator(".card").first.get_by_text("index: 79").wait_for()
    assert focused_index(page) == "79"
    page.keyboard.press("/")
    page.keyboard.type("9 <img")
    page.keyboard.press("Enter")
    page.locator(".card", has_text="id-009").wait_for()  # until then the cards are those of before
    page.locator(".card").nth(1).click()
    page.get_by_role("heading", name="id-019").wait_for()
    page.get_by_role("link", name="Next →").click()
    page.get_by_role("heading", name="id-029").wait_for()
    page.keyboard.press("Escape")
    page.locator(".card", has_text="id-009").wait_for()
    assert "q=9" in page.url
    assert focused_index(page) == "29"
    page.keyboard.press("Escape")
    until(page, "document.querySelectorAll('.card').length === 50")
    assert "q=" not in page.url


@needs_browser
@pytest.mark.parametrize("width", [400, pytest.param(1400, marks=pytest.mark.slow)])
def test_a_shard_shows_the_ends_of_ids_and_why_it_is_not_sorted(
    tmp_path: Path, browse: Callable[..., Any], width: int
) -> None:
    """A card shows the end of a long id, in which it differs from others; the page says that it is in stored order."""
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for number in range(3):
            tar.addfile(tarfile.TarInfo(f"{'episode_' * 9}{number:04}.txt"))
    page = browse(tmp_path / "x.tar", width)
    page.get_by_text("In stored order").wait_for()
    for number in range(3):
        card, end = (page.locator(f".card >> nth={number}{inner}") for inner in ("", " >> .id >> span >> nth=1"))
        assert end.inner_text() == f"e_{number:04}"
        right = end.bounding_box()["x"] + end.bounding_box()["width"]
        assert right <= card.bounding_box()["x"] + card.bounding_box()["width"]


@needs_browser
@pytest.mark.parametrize("scheme", ["dark", pytest.param("light", marks=pytest.mark.slow)])
def test_transparent_drawings_are_seen_on_light_and_dark_pages(
    tmp_path: Path, browse: Callable[..., Any], scheme: str
) -> None:
    """What is transparent has squares below it, of which neither is the colour of the lines or of the page."""
    from PIL import Image

    drawn = io.BytesIO()
    Image.new("LA", (40, 30)).save(drawn, "png")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        member = tarfile.TarInfo("a.png")
        member.size = len(drawn.getvalue())
        tar.addfile(member, io.BytesIO(drawn.getvalue()))
    page = browse(tmp_path / "x.tar", scheme=scheme)
    page.locator(".card").click()
    page.locator("img.mm-loaded").wait_for()
    assert "conic-gradient" in page.evaluate(
        "getComputedStyle(document.querySelector('img.mm-loaded')).backgroundImage"
    )


@needs_browser
def test_a_newer_version_is_offered(tmp_path: Path, browse: Callable[..., Any]) -> None:
    """A version that is published meanwhile is said without moving anything, and shown only when it is asked for."""
    (tmp_path / "in").mkdir()

    def publish(name: str) -> None:
        with tarfile.open(tmp_path / "in" / f"{name}.tar", "w") as tar:
            for key in (f"{name}1", f"{name}2"):
                member = tarfile.TarInfo(f"{key}.txt")
                member.size = len(key)
                tar.addfile(member, io.BytesIO(key.encode()))
        run_chain(declare(tmp_path / "root", tmp_path / "in"))

    publish("a")
    pages = [browse(tmp_path / "root" / "data", width) for width in (400, 1400)]
    boxes = []
    for page in pages:
        page.locator(".card").nth(1).wait_for()
        boxes.append(page.locator(".grid").bounding_box())
    publish("b")
    page.wait_for_timeout(5500)  # for which the server uses what it knows
    for page, before in zip(pages, boxes, strict=True):
        page.reload()
        offer = page.get_by_role("link", name="Show the newest")
        offer.wait_for()
        assert page.locator(".card").count() == 2
        assert page.locator(".grid").bounding_box() == before
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
        offer.focus()
        page.keyboard.press("Enter")
        page.locator(".card").nth(3).wait_for()
        assert page.locator("#newer").count() == 0
        page.locator(".card").nth(3).click()
        page.get_by_role("heading", name="b2").wait_for()
        page.go_back()
        page.go_back()
        until(page, "document.querySelectorAll('.card').length === 2")


@needs_browser
def test_samples_are_looked_at_with_the_keyboard_alone(packed: Path, browse: Callable[..., Any]) -> None:
    """Arrows move and turn, Enter opens, links keep the focus, Escape returns to the card, `/` searches, `?` helps."""
    page = browse(packed)
    page.locator(".card").nth(49).wait_for()
    assert "t=" not in page.url
    page.keyboard.press("ArrowRight")
    assert focused_index(page) == "0"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    columns = int(focused_index(page) or 0) - 1
    assert columns > 1
    page.keyboard.press("ArrowUp")
    assert focused_index(page) == "1"
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="id-001").wait_for()
    assert page.url.endswith("/?n=1")
    page.keyboard.press("ArrowRight")
    page.get_by_role("heading", name="id-002").wait_for()
    page.get_by_role("link", name="Next →").focus()
    for number in (3, 4):
        page.keyboard.press("Enter")
        page.get_by_role("heading", name=f"id-00{number}").wait_for()
        until(page, "document.activeElement?.rel === 'next'")
    page.keyboard.press("Escape")
    until(page, "document.activeElement?.dataset?.index === '4'")
    page.keyboard.press("/")
    page.keyboard.type("id-12")
    page.keyboard.press("Enter")
    page.locator(".card").nth(9).wait_for()
    until(page, "document.querySelectorAll('.card').length === 10")
    page.keyboard.press("Escape")
    until(page, "document.activeElement?.dataset?.index === '120'")
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")
    page.go_back()
    until(page, "document.querySelectorAll('.card').length === 50")
    assert page.title() != "run"


@needs_browser
def test_the_url_has_the_state(packed: Path, browse: Callable[..., Any]) -> None:
    """Page, search and sample are in the URL: opened again they are the same, and back and forward work."""
    page = browse(packed)
    page.get_by_role("link", name="Next").click()
    page.locator('.card[data-index="50"]').wait_for()
    assert page.url.endswith("/?offset=50")
    page.locator('.card[data-index="51"]').click()
    page.get_by_role("heading", name="id-051").wait_for()
    page.reload()
    page.get_by_role("heading", name="id-051").wait_for()
    page.go_back()
    page.locator('.card[data-index="50"]').wait_for()
    page.go_forward()
    page.get_by_role("heading", name="id-051").wait_for()
    page.get_by_label("Search ids").fill("#129")
    page.get_by_role("button", name="Search").click()
    page.get_by_role("heading", name="id-129").wait_for()
    other = page.context.new_page()  # whose console has the 404, which is expected
    other.goto("/?n=4000")
    other.get_by_role("alert").filter(has_text="there is no sample 4,000").wait_for(timeout=PATIENCE)


@needs_browser
@pytest.mark.parametrize(("width", "height", "scheme"), [(400, 800, "dark"), (3840, 2160, "light")])
def test_every_size_of_screen_is_usable(
    packed: Path, browse: Callable[..., Any], width: int, height: int, scheme: str
) -> None:
    """At 400 px and at 4k nothing is wider than the screen, pictures do not shift the page, and names are read out."""
    page = browse(packed, width, height, scheme=scheme)
    page.locator(".card").first.wait_for()
    page.evaluate(
        "window.shift = 0;"
        "new PerformanceObserver(list => list.getEntries().forEach(e => { window.shift += e.value; }))"
        ".observe({type: 'layout-shift', buffered: true})"
    )
    until(page, "document.querySelector('.card img')?.complete")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator(".card").first.click()
    page.locator(".item img").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("window.shift") < 0.1
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, a, input, select')]"
        ".filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.title)).length"
    )
    assert unnamed == 0
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")


@needs_browser
@pytest.mark.parametrize(
    ("corpus", "shard", "tag"), [("video", "video-00000.tar", "video"), ("speech", "speech-00000.tar", "audio")]
)
def test_sound_and_video_are_sought_by_range(
    shared_data: Path, browse: Callable[..., Any], corpus: str, shard: str, tag: str
) -> None:
    """A player that is sought goes there and plays on, and the server answers its requests with ranges."""
    page = browse(shared_data / corpus / shard)
    statuses: list[int] = []
    page.on("response", lambda answer: statuses.append(answer.status) if "/media/" in answer.url else None)
    page.locator(".card").first.click()
    player = page.locator(tag).first
    player.wait_for(state="attached")
    # Without a user's gesture a browser only plays what is muted.
    player.evaluate("e => { e.muted = true; e.preload = 'auto'; e.load(); }")
    until(page, f"document.querySelector('{tag}').readyState >= 1")
    # A FLAC file need not say how long it is.
    middle = player.evaluate("e => (Number.isFinite(e.duration) ? e.duration / 2 : 2)")
    player.evaluate("(e, at) => { e.currentTime = at; return e.play(); }", middle)
    until(page, f"document.querySelector('{tag}').currentTime > {middle}")
    assert statuses.count(206) >= 1
    assert {status for status in statuses if status >= 400} == set()


@needs_browser
@pytest.mark.parametrize(
    "corpus",
    [
        *("docai", "image-text", "mint1t-html", "mint1t-pdf", "music", "robotics", "speech", "video"),
        pytest.param("mint1t-pages", marks=pytest.mark.slow),
    ],
)
def test_each_kind_of_sample_is_drawn(shared_data: Path, browse: Callable[..., Any], corpus: str) -> None:
    """The first samples of every corpus open without a complaint of the browser, and each item has a body."""
    page = browse(f"{shared_data / corpus}/*.tar")
    page.locator(".card").first.wait_for()
    for n in range(min(3, page.locator(".card").count())):
        page.goto(f"/?n={n}")
        page.locator(".item").first.wait_for()
        until(page, "[...document.querySelectorAll('.item .body')].every(e => e.childElementCount > 0)")
        assert page.locator(".note.bad").count() == 0


@needs_browser
def test_nothing_in_a_hostile_shard_runs(tmp_path: Path, browse: Callable[..., Any]) -> None:
    """Markup in names, keys, captions, JSON, HTML and SVG is shown as text: no script runs and nothing is loaded."""
    script = "document.title='run'"
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" onload="{script}"><script>{script}</script></svg>'
    members = {
        f"a{HOSTILE}.txt": HOSTILE,
        f"a{HOSTILE}.json": json.dumps({HOSTILE: HOSTILE, "__proto__": {"polluted": 1}, "caption": HOSTILE}),
        f"a{HOSTILE}.svg": svg,
        f"a{HOSTILE}.html": f"<!doctype html>{HOSTILE}",
        "b.json": "[" * 500 + "]" * 500,
        "b.png": "not a picture",
    }
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name, text in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    page = browse(tmp_path / "x.tar")
    foreign: list[str] = []
    page.on("request", lambda request: foreign.append(request.url) if "127.0.0.1" not in request.url else None)
    page.locator(".card").nth(1).wait_for()
    for n in range(2):
        page.goto(f"/?n={n}")
        page.locator(".item").first.wait_for()
        until(page, "[...document.querySelectorAll('.item .body')].every(e => e.childElementCount > 0)")
        assert page.title() != "run"
        assert page.evaluate("({}).polluted") is None
        assert page.locator(".item script, .item svg script, .item img[src=x]").count() == 0
    assert foreign == []


@needs_browser
def test_partitions_and_their_stages_are_chosen(tmp_path: Path, browse: Callable[..., Any]) -> None:
    """From the page of partitions to one of them, and from its packed samples to its rows and its shards."""
    (tmp_path / "in").mkdir()
    for key in ("a", "b"):
        with tarfile.open(tmp_path / "in" / f"{key}.tar", "w") as archive:
            member = tarfile.TarInfo(f"{key}1.txt")
            member.size = 5
            archive.addfile(member, io.BytesIO(b"words"))
    run_chain(declare(tmp_path / "root", tmp_path / "in"))
    page = browse(tmp_path / "root" / "data")
    until(page, "document.querySelectorAll('.card').length === 2")
    page.get_by_role("link", name="Partitions").click()
    page.get_by_role("link", name="b", exact=True).click()
    until(page, "document.querySelectorAll('.card').length === 1")
    assert "packed of partition b" in page.locator("#subtitle").text_content()
    for stage in ("rows", "shards"):
        page.get_by_label("Stage").select_option(stage)
        until(page, f"document.getElementById('subtitle').textContent.startsWith('{stage} of partition b')")
        until(page, "document.querySelectorAll('.card').length === 1")
        page.locator(".card").click()
        page.get_by_role("heading", name="b1").wait_for()
        page.get_by_text("words", exact=True).first.wait_for()
        page.keyboard.press("Escape")
        page.locator(".card").wait_for()
    page.go_back()
    page.get_by_text("words", exact=True).first.wait_for()


def test_the_command_prints_its_url_at_once_and_ends_at_once(packed: Path) -> None:
    """The first line is the URL; without its token requests are 403; an interrupt ends it, code 0."""
    with viewer(packed) as (url, process):
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(url.partition("?")[0], timeout=60)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert time.monotonic() - begun < 20  # on a busy machine


def test_wrong_use_is_said_before_a_server_runs(tmp_path: Path) -> None:
    """A location that does not exist, and one that is nothing known, are errors of one line and a code."""
    (tmp_path / "x.bin").write_bytes(b"nothing known")
    for location, said in ((tmp_path / "missing.tar", "missing.tar"), (tmp_path / "x.bin", "expected tar")):
        done = subprocess.run([*COMMAND, str(location)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert said in done.stderr
