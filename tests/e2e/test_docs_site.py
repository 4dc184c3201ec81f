"""The built documentation in a browser, opened from its folder: search, pictures, a narrow window, no other host."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .browser import needs_browser

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = needs_browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of `make docs`."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, check=True)
    return folder


def test_the_site_works_from_its_folder(site: Path, browser: Any) -> None:
    """Search finds a section and leads to it; pictures load; nothing is asked of another host or logged as an error."""
    requests: list[str] = []
    errors: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(60_000)
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((site / "index.html").as_uri())
    page.get_by_role("textbox", name="Search").first.click()
    page.keyboard.type("locate credentials")
    found = page.locator(".md-search-result__link").filter(has_text="Troubleshooting").first
    found.click()
    page.wait_for_url("**/how-to/troubleshooting.html*")
    page.goto((site / "quick-start.html").as_uri())
    picture = page.get_by_alt_text("24 drawings of the demo dataset in three rows")
    picture.scroll_into_view_if_needed()
    page.wait_for_function("image => image.complete && image.naturalWidth > 0", arg=picture.element_handle())
    page.set_viewport_size({"width": 400, "height": 800})
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert errors == []
    assert wide <= 400
