"""Every kind of item drawn by a browser: one sample with a modality of each kind, in the viewer."""

import io
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mm_assets
from mm_assets.fields import SyncedVideoAudioField, TimedTextField, TimeSeriesField

from ..display.test_values import CASES, SCRIPT
from ..fields.clips import clip_file, ramp
from ..media.subtitled import subtitled
from .browser import needs_browser, until

pytestmark = needs_browser

# VP8 and Opus: every build of a browser plays them.
FILM = clip_file(
    container="webm", codec="libvpx", num_frames=75, samples=ramp(144_000), sample_rate=48_000, audio_codec="libopus"
)
SECONDS = np.arange(300) / 100


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample with every kind of value, and one with a film, its words and a series."""
    path = tmp_path_factory.mktemp("items") / "all.mult"
    names = {name: re.sub(r"\W+", "_", name) for name in CASES if "video" not in name}
    film = {"film": SyncedVideoAudioField(), "subtitles": TimedTextField(), "pose": TimeSeriesField()}
    with mm_assets.create(path, {names[name]: CASES[name][0] for name in names} | film) as writer:
        writer.write("all", {names[name]: CASES[name][1] for name in names})
        words = [(0.0, 1.0, "first"), (1.0, 2.0, SCRIPT), (2.0, 3.0, "third")]
        pose = (SECONDS, np.stack([np.sin(SECONDS), SECONDS] * 6, axis=1))
        writer.write("film", {"film": FILM, "subtitles": words, "pose": pose})
    return path


@pytest.fixture
def draw(browse: Callable[..., Any]) -> Callable[..., Any]:
    """Opens the page of a sample; what the browser complains about fails the test."""

    def open_sample(path: Path, index: int, **options: Any) -> Any:
        page = browse(path, **options)
        page.locator(".card").first.wait_for()
        page.goto(f"/?n={index}")
        page.locator(".mm-item").first.wait_for(state="attached")
        return page

    return open_sample


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
def test_every_kind_is_drawn(packed: Path, draw: Callable[..., Any], width: int, scheme: str) -> None:
    """A sample with a modality of each kind is drawn without a complaint, within the width of the screen."""
    page = draw(packed, 0, width=width, scheme=scheme)
    until(page, f"document.querySelectorAll('.mm-item').length >= {len(CASES)}")
    until(page, "[...document.images].filter((one) => one.loading !== 'lazy').every((one) => one.complete)")
    found = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('section.item')].map((one) => [one.dataset.name,"
        " one.querySelector('.mm-item')?.className ?? one.dataset.kind]))"
    )
    for name, (_, _, kind) in CASES.items():
        if "video" not in name:
            assert kind in found[re.sub(r"\W+", "_", name)], (name, found)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".mm-failure").all_inner_texts() == []
    assert page.evaluate("document.querySelectorAll('script:not([src])').length") == 0
    unnamed = page.evaluate(
        "[...document.querySelectorAll('.mm-item button, .mm-item [tabindex], .mm-item input, .mm-item audio')]"
        ".filter((one) => !(one.ariaLabel || one.textContent.trim() || one.labels?.length))"
        ".map((one) => one.outerHTML)"
    )
    assert unnamed == []


def test_pictures_are_enlarged_and_frames_turned(packed: Path, draw: Callable[..., Any]) -> None:
    """A small picture is drawn larger; the keys + and 0 enlarge it and fit it, a click too; a slider turns frames."""
    page = draw(packed, 0)
    image = page.locator("section[data-name=image]")
    image.locator("img").scroll_into_view_if_needed()
    until(page, "document.querySelector('section[data-name=image] img').complete")
    drawn, stored = image.locator("img").evaluate("picture => [picture.clientWidth, picture.naturalWidth]")
    assert (drawn, stored) == (256, 64)
    image.locator(".mm-zoom").focus()
    page.keyboard.press("+")
    assert image.locator(".mm-level").inner_text() == "600 %", "one and a half times as large as it was"
    page.keyboard.press("0")
    assert image.locator(".mm-level").inner_text() == "fit"
    image.locator("img").click()
    assert image.locator(".mm-level").inner_text() != "fit"
    frames = page.locator("section[data-name=images]")
    before = frames.locator("img").get_attribute("src")
    frames.get_by_role("button", name="The next one").click()
    assert frames.locator(".mm-level").last.inner_text() == "2 of 2"
    assert frames.locator("img").get_attribute("src") != before
    document = page.locator("section[data-name=document]")
    document.get_by_text("Labels", exact=True).click()
    assert document.locator(".mm-box-label:visible").all_inner_texts() == ["question", "answer"]
    assert document.locator(".mm-links line").count() == 1


def test_words_plots_and_film_share_a_clock(packed: Path, draw: Callable[..., Any]) -> None:
    """A word, a point of a plot and a frame of the strip seek the film, and a film that plays lights up its words."""
    page = draw(packed, 1)
    at = "document.querySelector('video').currentTime"
    until(page, "document.querySelector('video').readyState > 0")
    page.locator(".mm-word").nth(2).click()
    until(page, f"Math.abs({at} - 2) < 0.1")
    until(page, "document.querySelector('.mm-word.mm-now')?.textContent === 'third'")
    page.locator("section[data-name=pose] .mm-timeline").focus()
    page.keyboard.press("Home")
    until(page, f"{at} < 0.1")
    page.keyboard.press("PageDown")
    until(page, f"Math.abs({at} - 0.299) < 0.05")
    page.locator(".mm-thumb").nth(5).click()
    until(page, f"{at} > 1.5")
    page.get_by_role("button", name="Plot all 12 channels").click()
    assert page.locator("section[data-name=pose] canvas").evaluate("(one) => one.clientHeight") > 700
    page.locator(".mm-word").nth(0).click()
    page.evaluate("(() => { const film = document.querySelector('video'); film.muted = true; film.play(); })()")
    until(page, f"{at} > 1.05")
    until(page, f"document.querySelector('.mm-word.mm-now')?.textContent === {SCRIPT!r}")
    assert page.evaluate("document.querySelector('video').textTracks[0].label") == "subtitles"


def test_sound_plays_with_its_waveform(packed: Path, draw: Callable[..., Any]) -> None:
    """A recording's waveform is drawn, and its keys move the player."""
    page = draw(packed, 0)
    sound = page.locator("section[data-name=audio]")
    sound.locator(".mm-timeline").scroll_into_view_if_needed()
    until(page, "document.querySelector('section[data-name=audio] audio').readyState > 0")
    drawn = (
        "(() => { const one = document.querySelector('section[data-name=audio] canvas');"
        " return one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some((byte) => byte); })()"
    )
    until(page, drawn)
    sound.locator(".mm-timeline").focus()
    page.keyboard.press("PageDown")
    until(page, "Math.abs(document.querySelector('section[data-name=audio] audio').currentTime - 0.1) < 0.02")


def test_notes_are_heard(packed: Path, draw: Callable[..., Any]) -> None:
    """The notes of a MIDI file play as tones, and the playhead of the piano roll moves with them."""
    page = draw(packed, 0)
    notes = page.locator("section[data-name=MIDI]")
    notes.get_by_role("button", name="Play the notes").click()
    position = "Number(document.querySelector('section[data-name=MIDI] .mm-timeline').getAttribute('aria-valuenow'))"
    until(page, f"{position} > 0.3")
    notes.get_by_role("button", name="Play the notes").click()
    stopped = page.evaluate(position)
    page.wait_for_timeout(300)
    assert page.evaluate(position) == stopped


def test_subtitles_in_a_file_are_shown_with_it(tmp_path: Path, draw: Callable[..., Any]) -> None:
    """A film's own track is chosen in its player, and its cue is active where the film is."""
    cues = [(0, 900, "one"), (1000, 900, "2 &lt; 3")]
    film = subtitled("webm", "webvtt", [("eng", cues), ("deu", cues[:1])], video="libvpx")
    with tarfile.open(tmp_path / "films.tar", "w") as tar:
        member = tarfile.TarInfo("a.webm")
        member.size = len(film)
        tar.addfile(member, io.BytesIO(film))
    page = draw(tmp_path / "films.tar", 0)
    until(page, "document.querySelector('video')?.textTracks[0]?.cues?.length === 2")
    facts = "[...document.querySelector('video').textTracks].map((one) => [one.label, one.language, one.mode])"
    tracks = page.evaluate(facts)
    assert tracks == [["eng", "eng", "showing"], ["deu", "deu", "disabled"]]
    page.evaluate("document.querySelector('video').currentTime = 1.5")
    until(page, "document.querySelector('video').textTracks[0].activeCues?.length === 1")
    cue = "document.querySelector('video').textTracks[0].activeCues[0].getCueAsHTML().textContent"
    assert page.evaluate(cue) == "2 < 3"


@pytest.mark.parametrize("width", [400, pytest.param(1400, marks=pytest.mark.slow)])
def test_token_ids_are_counted(tmp_path: Path, draw: Callable[..., Any], width: int) -> None:
    """The ids of a table's column wrap, and by the keyboard their counts are opened: a histogram and a list."""
    ids = [7] * 30 + [50_000, *range(200)]
    (tmp_path / "tokens.jsonl").write_text(json.dumps({"sample_id": "a", "input_ids": ids}))
    page = draw(tmp_path / "tokens.jsonl", 0, width=width, scheme="dark")
    section = page.locator("section[data-kind=tokens]")
    assert section.locator(".mm-ids li").count() == len(ids)
    section.locator("summary").focus()
    page.keyboard.press("Enter")
    drawn = (
        "(() => { const one = document.querySelector('.mm-histogram canvas');"
        " return one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some((byte) => byte); })()"
    )
    until(page, "document.querySelector('.mm-histogram canvas').height === 64")  # it has its size when it is drawn
    assert page.evaluate(drawn)
    assert section.get_by_role("img").get_attribute("aria-label").startswith("Tokens by id, from 0 to 50000")
    assert section.locator("tbody tr").first.inner_text().split() == ["7", "31"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert section.locator("details").bounding_box()["width"] > 300
