"""Takes the pictures of the documentation from the running product: `make screenshots`, a minute.

The demo data are packed in a folder for temporary files, Dagster's webserver and `mm-assets view` show them, and a
browser with windows of fixed sizes takes the pictures. What differs from one run to the next, such as times and ids,
is replaced in the page before that. Some pictures are made by the code of a tutorial; its test makes those.

    python docs/screenshots.py               # all of docs/images
    python docs/screenshots.py view-grid     # some, by name
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

DOCS = Path(__file__).resolve().parent
REPOSITORY = DOCS.parent
IMAGES = DOCS / "images"

MAX_BYTES = 150_000
SAME_LEVELS, SAME_PIXELS = 12, 20  # a picture is the same if at most so many pixels differ by so many levels
PATIENCE = 90.0  # seconds, on a busy machine
MM_ASSETS = [sys.executable, "-c", "from mm_assets.cli.main import main; main()"]
CHROMIUM_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--font-render-hinting=none"]
INSTANCE = "telemetry:\n  enabled: false\nnux:\n  enabled: false\n"

DRAWINGS = [
    *("--dataset", "drawings", "--shards", "mm_assets/defs/demo/shards/captions-*.tar"),
    *("--set", "settle_seconds=0", "--set", "annotators=[{type: image_size}]"),
]
"""The demo captions as a dataset of two versions, of which the second drops small drawings."""

TUTORIALS = {"quick-start": "quick_start", "few-colors": "your_own_filter"}
"""Pictures that the code of a page makes, with the test that runs it."""

REPLACED = [
    (r"\b[A-Z][a-z]{2} \d+,( \d{4},)? \d+:\d\d(:\d\d)? [AP]M", "Jan 2, 9:00 AM"),
    (r"\b\d{4}-\d\d-\d\d \d\d:\d\d\b", "2026-01-02 09:00"),
    (r"\b\d+:\d\d:\d\d\b", "0:00:01"),
    (r"^0:\d\d$", "0:15"),
    (r"\bin \d[\d.]* m?s\b", "in 0.1 s"),
    (r"\S*/pictures-[^/]+/", ""),
]
"""What differs from one run to the next, as regular expressions of the browser, and what is shown instead: times,
durations, the clock of a page that loads again, the folder for temporary files."""

REPLACE = r"""([replaced, isFrozen]) => {
    if (isFrozen) document.body.replaceWith(document.body.cloneNode(true));  // no clock of the page runs on
    const known = new Map();
    const numbered = digest => {  // run ids and digests: another one for each, the same ones in each run
        const number = (known.size + 5) * 0x9e3779b97f4 % 2 ** 48;
        if (!known.has(digest)) known.set(digest, number.toString(16).padStart(12, "0"));
        return known.get(digest).slice(-digest.length);
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        let text = walker.currentNode.data;
        for (const [found, shown] of replaced) text = text.replace(new RegExp(found, "g"), shown);
        text = text.replace(/\b(?=[a-f]*[0-9])([0-9a-f]{12}|[0-9a-f]{8})\b/g, numbered);
        if (text !== walker.currentNode.data) walker.currentNode.data = text;
    }
    document.activeElement?.blur();
}"""


@dataclass(frozen=True)
class Shot:
    """A picture.

    Attributes:
        server: what shows the page: `dagster`, or the dataset that `mm-assets view` has open.
        path: the page, below the server's URL.
        size: width and height of the window, in pixels.
        prepare: waits for the page, and brings it to what is shown.
    """

    server: str
    path: str
    size: tuple[int, int]
    prepare: Callable[[Any], None]


SHOTS: dict[str, Shot] = {}


def shot(name: str, server: str, path: str, size: tuple[int, int]) -> Callable[[Callable[[Any], None]], None]:
    """Register a picture with the function that prepares its page."""

    def registered(prepare: Callable[[Any], None]) -> None:
        SHOTS[name] = Shot(server, path, size, prepare)

    return registered


# --- Dagster ----------------------------------------------------------------------------------------------------------


@shot("asset-graph", "dagster", "/locations/mm_assets.definitions/asset-groups/docs", (1260, 480))
def _(page: Any) -> None:
    page.get_by_text("manifest", exact=True).first.wait_for()
    green = "/^rgb\\((\\d+), (\\d+)/.exec(getComputedStyle(e).borderTopColor)"
    _until(page, f"[...document.querySelectorAll('div')].filter(e => +{green}?.[2] > +{green}?.[1] + 60).length >= 7")


@shot(
    "partition-samples",
    "dagster",
    "/assets/captions/filtered_rows?view=partitions&partition=captions-00000",
    (1160, 880),
)
def _(page: Any) -> None:
    page.locator('img[src^="data:image/webp"]').first.wait_for()


@shot("partition-checks", "dagster", "/assets/docs/filtered_rows?view=checks", (1160, 660))
def _(page: Any) -> None:
    page.get_by_text("This is a blocking asset check").or_(page.get_by_text("blocking")).first.wait_for()


@shot("runs", "dagster", "/runs", (1260, 470))
def _(page: Any) -> None:
    page.get_by_text("captions_load").first.wait_for()


# --- mm-assets view ---------------------------------------------------------------------------------------------------


def _items(page: Any) -> None:
    """Wait for all items of a sample."""
    page.locator(".item").first.wait_for()
    _until(page, "[...document.querySelectorAll('.item .body')].every(e => e.childElementCount > 0)")
    _pictures(page)


def _pictures(page: Any) -> None:
    """Wait for the pictures of a page that the window shows."""
    _until(
        page,
        "[...document.querySelectorAll('img')].every(e => e.getBoundingClientRect().top > innerHeight "
        "|| (e.complete && e.naturalWidth > 0))",
    )


@shot("view-grid", "captions", "/", (1280, 760))
def _(page: Any) -> None:
    page.locator(".card").first.wait_for()
    _pictures(page)


@shot("view-document", "docs", "/?n=0", (1280, 760))
def _(page: Any) -> None:
    _items(page)


@shot("view-pair", "captions", "/?n=7", (1280, 640))
def _(page: Any) -> None:
    _items(page)


@shot("view-speech", "speech", "/?n=0", (1280, 640))
def _(page: Any) -> None:
    _items(page)


@shot("view-video", "video", "/?n=0", (900, 640))
def _(page: Any) -> None:
    _items(page)
    page.locator("video").evaluate("film => { film.preload = 'auto'; film.load(); }")  # else it is read as it plays
    _until(
        page,
        "(film => film.buffered.length && film.buffered.end(0) > film.duration - 0.1)(document.querySelector('video'))",
    )


@shot("explore-drops", "drawings", "/?page=drops", (1280, 620))
def _(page: Any) -> None:
    page.locator(".card").first.wait_for()
    _pictures(page)


@shot("explore-scores", "drawings", "/?page=scores", (1280, 720))
def _(page: Any) -> None:
    page.get_by_role("slider", name="Smallest kept").wait_for()
    page.locator("#at_least").fill("500")
    page.get_by_text("would keep").first.wait_for()


@shot("explore-sql", "drawings", "/?page=sql", (1280, 760))
def _(page: Any) -> None:
    editor = page.get_by_label("SQL (DuckDB)")
    editor.fill(
        "select partition, sample_id, image_width, image_height\n"
        "from filtered_rows where modality = 'image'\norder by image_width limit 8"
    )
    editor.press("Control+Enter")
    page.get_by_text("8 rows in").first.wait_for()


@shot("explore-versions", "drawings", "/?page=versions", (1280, 700))
def _(page: Any) -> None:
    page.get_by_role("button", name="▸ captions-00000").click()
    page.get_by_text("image_size.width_below_min").first.wait_for()


def _until(page: Any, condition: str) -> None:
    """Wait for a condition; Playwright's own way would evaluate text in the page, which the viewer's policy forbids."""
    ends = time.monotonic() + PATIENCE
    while not page.evaluate(condition):
        if time.monotonic() > ends:
            raise TimeoutError(condition)
        page.wait_for_timeout(50)


# --- what is photographed ---------------------------------------------------------------------------------------------


def load(home: Path, *, drawings: bool) -> dict[str, str]:
    """Pack the demo data in a folder, and give the environment in which commands find them.

    Raises:
        subprocess.CalledProcessError: a load failed.
    """
    (home / "dagster.yaml").write_text(INSTANCE)
    names = {"DAGSTER_HOME": str(home), "MM_ASSETS_ROOT": str(home / "data"), "PYTHONUNBUFFERED": "1", "TZ": "UTC"}
    environment = {**os.environ, **names, "PYTHONPATH": str(REPOSITORY)}
    runs: list[list[str]] = [["--jobs", "1"]]
    if drawings:
        for filters in ([], [{"type": "image_size", "min_width": 350, "scope": "sample"}]):
            runs.append([*DRAWINGS, "--root", str(home / "data"), "--set", f"filters={json.dumps(filters)}"])
    for arguments in runs:
        subprocess.run(
            [*MM_ASSETS, "run", *arguments], cwd=REPOSITORY, env=environment, capture_output=True, check=True
        )
    return environment


@contextmanager
def process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the repository's folder, ended with its children; its output is in a file."""
    with log.open("wb") as output:
        begun = subprocess.Popen(
            command, cwd=REPOSITORY, env=dict(environment), stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield begun
        finally:
            os.killpg(begun.pid, signal.SIGKILL)
            begun.wait(30)


@contextmanager
def serve(server: str, home: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Dagster's webserver, or the viewer over a dataset; the URL of its front page."""
    log = home / f"{server}.log"
    if server == "dagster":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "dagster_webserver",
            "-w",
            "workspace.yaml",
            "-h",
            "127.0.0.1",
            "-p",
            str(port),
        ]
        url = f"http://127.0.0.1:{port}"
    else:
        command, url = [*MM_ASSETS, "view", str(home / "data" / server)], ""
    with process(command, environment, log) as begun:
        ends = time.monotonic() + PATIENCE
        while True:
            url = url or log.read_text().partition("\n")[0]
            if url and _answers(url):
                break
            if begun.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"{server} does not answer: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        yield url


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def take(name: str, page: Any, url: str, folder: Path) -> Path:
    """Photograph one page into a folder.

    Raises:
        ValueError: the picture is larger than `MAX_BYTES`.
    """
    one = SHOTS[name]
    page.set_viewport_size({"width": one.size[0], "height": one.size[1]})
    page.goto(url.partition("/?")[0] + one.path)
    one.prepare(page)
    if (navigation := page.get_by_text("Hide navigation")).count():  # Dagster's, which takes a fifth of the width
        navigation.click()
    page.wait_for_timeout(700)  # transitions and layouts come to rest
    page.evaluate(REPLACE, [REPLACED, one.server == "dagster"])
    path = folder / f"{name}.png"
    save(Image.open(io.BytesIO(page.screenshot(animations="disabled", caret="hide"))), path)
    return path


def save(image: Image.Image, path: Path) -> None:
    """Write a picture with as many colors as `MAX_BYTES` allow, unless the file shows the same.

    The browser's antialiasing differs by a gray level from one run to the next, in a few pixels.

    Raises:
        ValueError: 32 colors are still too many bytes.
    """
    for colors in (256, 128, 64, 32):
        made, stored = image.convert("RGB").quantize(colors, dither=Image.Dither.NONE), io.BytesIO()
        made.save(stored, "PNG", optimize=True)
        if len(stored.getvalue()) <= MAX_BYTES:
            if not (path.exists() and _is_same(made, path)):
                path.write_bytes(stored.getvalue())
            return
    raise ValueError(f"{path.name}: has {len(stored.getvalue()):,} bytes, at most {MAX_BYTES:,} are allowed")


def _is_same(made: Image.Image, path: Path) -> bool:
    with Image.open(path) as before:
        if before.size != made.size:
            return False
        difference = ImageChops.difference(before.convert("RGB"), made.convert("RGB")).convert("L")
    return sum(difference.histogram()[SAME_LEVELS:]) <= SAME_PIXELS


def take_all(names: Sequence[str], folder: Path) -> None:
    """Take pictures of the running product into a folder.

    Raises:
        RuntimeError: a server does not answer, or there is no chromium.
    """
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise RuntimeError("there is no chromium on this machine: install the package chromium")
    servers = {SHOTS[name].server for name in names}
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pictures-", ignore_cleanup_errors=True)))
        environment = load(home, drawings="drawings" in servers)
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=chromium, args=CHROMIUM_ARGUMENTS
        )
        stack.callback(browser.close)
        for server in sorted(servers):
            with serve(server, home, environment) as url:
                context = browser.new_context(locale="en-US", timezone_id="UTC", color_scheme="light")
                page = context.new_page()
                page.set_default_timeout(PATIENCE * 1000)
                page.goto(url)  # the viewer's token becomes a cookie
                page.wait_for_load_state("networkidle") if server != "dagster" else None
                for name in names:
                    if SHOTS[name].server == server:
                        print(take(name, page, url, folder), flush=True)
                context.close()


def main(arguments: Sequence[str]) -> None:
    """Take the pictures of these names, or all."""
    names = list(arguments) or [*SHOTS, *TUTORIALS]
    if unknown := set(names) - SHOTS.keys() - TUTORIALS.keys():
        sys.exit(f"no such picture: {', '.join(sorted(unknown))}; there are {', '.join([*SHOTS, *TUTORIALS])}")
    if tests := " or ".join(TUTORIALS[name] for name in names if name in TUTORIALS):
        command = [sys.executable, "-m", "pytest", "-q", "tests/pages/test_guides.py", "-k", tests]
        subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "MM_ASSETS_PICTURES": "write"}, check=True)
    if shots := [name for name in names if name in SHOTS]:
        take_all(shots, IMAGES)


if __name__ == "__main__":
    main(sys.argv[1:])
