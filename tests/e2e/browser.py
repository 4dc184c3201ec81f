"""A browser for the tests of a module, and pages of the viewer in it."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .warm import WarmCommands

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
PATIENCE = 60_000  # milliseconds, of a busy machine

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: no page is looked at")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser; each test opens pages of its own in it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def browse(browser: Any, warm_commands: WarmCommands) -> Iterator[Callable[..., Any]]:
    """Opens locations in a viewer and its page in a browser; what the browser complains about fails the test."""
    complaints: list[str] = []

    def open_page(location: Path | str, width: int = 1400, height: int = 900, *, scheme: str = "light") -> Any:
        arguments = ["view", str(location)]
        url = stack.enter_context(warm_commands.running(arguments, cwd=Path.cwd(), env=os.environ)).first_line()
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, base_url=url.partition("?")[0]
        )
        stack.callback(context.close)  # before the viewer, whose answers its pages may wait for
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("response", lambda answer: complaints.append(answer.url) if answer.status >= 400 else None)
        page.goto(url)
        page.wait_for_url(lambda found: "t=" not in found)  # the token is a cookie then
        return page

    with ExitStack() as stack:
        yield open_page
    assert complaints == []


def until(page: Any, condition: str) -> None:
    """Waits for a condition of the page; Playwright's own way evaluates text in it, which the page's policy forbids."""
    ends = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < ends, condition
        page.wait_for_timeout(20)
