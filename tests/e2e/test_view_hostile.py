"""The viewer by a browser over data and URLs of an attacker: nothing runs, and every page is drawn."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mm_assets.pipeline.state.folder import DatasetStore

from ..pipeline.chain import declare, run_chain
from ..pipeline.explore.test_diff import again
from ..pipeline.shards import make_shard, png
from .browser import needs_browser, until

RUN = "document.title='run'"
HOSTILE = f'<img src=x onerror="{RUN}">\'"\u202e\u2066'
PAGES = ("", "filter", "sql", "drops", "scores", "partitions", "versions", "origin")
STRANGE = ("open", "content", "constructor", "__proto__", "toString", HOSTILE)

pytestmark = needs_browser


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetStore:
    """Two versions of samples whose ids, captions, columns, values and drops are markup and control characters."""
    members: dict[str, object] = {
        ".hidden": b"not a sample",
        "broken.png": b"\x89PNG\r\n\x1a\nxx",
        "broken.txt": HOSTILE,
    }
    for n in range(4):
        key = f"{n}{HOSTILE}"
        members |= {f"{key}.png": png(n, (16, 8 + 4 * n)), f"{key}.txt": f"javascript:{RUN} {HOSTILE}"}
        members[f"{key}.json"] = {HOSTILE: HOSTILE, "title": f"javascript:{RUN}", f"__proto__{n}": {"polluted": 1}}
    make_shard(tmp_path / "in" / "a.tar", members)
    rule = {"type": "image_size", "scope": "sample"}
    spec = declare(tmp_path / "root", tmp_path / "in", filters=[{**rule, "min_width": 9}])
    run_chain(spec)
    stricter = DatasetStore(spec.replace(filters=({**rule, "min_width": 13},)))
    again(stricter)
    return stricter


def quiet(page: Any) -> None:
    """Checks that nothing of an attacker ran in a page."""
    assert page.title() != "run"
    assert page.evaluate("({}).polluted") is None
    selector = "main script, main iframe, main object, main embed, main img[src=x], main [onerror], [href^=javascript]"
    assert page.locator(selector).count() == 0


def watched(page: Any) -> list[str]:
    """The requests of a page that leave this machine."""
    foreign: list[str] = []
    page.on("request", lambda request: foreign.append(request.url) if "127.0.0.1" not in request.url else None)
    page.on("dialog", lambda dialog: foreign.append(f"dialog {dialog.message}"))
    return foreign


def test_no_page_of_a_hostile_dataset_runs_anything(dataset: DatasetStore, browse: Callable[..., Any]) -> None:
    """Each page of a dataset, a sample, its origin, a drop and a query that names its columns are drawn as text."""
    page = browse(dataset.store.url)
    foreign = watched(page)
    for name in PAGES:
        page.goto(f"/?page={name}")
        until(page, "document.getElementById('main').textContent.length > 10")
        until(page, "!document.querySelector('main [aria-busy]')")
        quiet(page)
    page.goto("/?n=0")
    page.get_by_text("Where it came from").click()
    page.locator("#origin table").first.wait_for()
    quiet(page)
    page.goto("/?page=drops")
    page.locator(".card").first.click()
    page.locator("main h2").wait_for()
    quiet(page)
    column = '"' + HOSTILE.replace('"', '""') + '"'
    sql = f"select sample_id, partition, 'javascript:1' as {column} from rows"
    page.goto(f"/?page=sql&sql={quote(sql)}")
    page.locator("#sql-result table").wait_for()
    assert HOSTILE in page.locator("#sql-result th").last.text_content()
    quiet(page)
    page.goto("/?page=versions")
    page.locator("#diff button").first.click()
    until(page, "!document.querySelector('main [aria-busy]')")
    quiet(page)
    assert foreign == []


def test_no_state_of_a_url_runs_anything(dataset: DatasetStore, browse: Callable[..., Any]) -> None:
    """Names that every JavaScript object has, and markup as each parameter, show the samples or an error."""
    page = browse(dataset.store.url).context.new_page()  # whose console has refusals, which are expected
    page.set_default_timeout(60_000)
    foreign = watched(page)
    for name in STRANGE:
        page.goto(f"/?page={quote(name)}")
        until(page, "document.getElementById('main').textContent.length > 5")
        assert "does not answer" not in page.locator("main").text_content()
        quiet(page)
    hostile = quote(HOSTILE)
    for query in (
        f"part={hostile}",
        f"q={hostile}",
        f"n={hostile}",
        f"page=drops&of={hostile}&partition={hostile}",
        f"page=scores&score={hostile}",
        f"page=origin&shard={hostile}&member={hostile}",
        f"page=versions&old={hostile}&new={hostile}",
        f"page=filter&where={hostile}&order={hostile}&relation={hostile}",
        f"page=sql&sql={hostile}",
    ):
        page.goto(f"/?{query}")
        until(page, "document.getElementById('main').textContent.length > 5")
        until(page, "!document.querySelector('main [aria-busy]')")
        quiet(page)
    assert foreign == []


def test_odd_tables_and_shards_are_drawn(tmp_path: Path, browse: Callable[..., Any]) -> None:
    """Hostile names of columns, ids of control characters, members of one name, and deep JSON have a page each."""
    table = {HOSTILE: ["x"], "sample_id": [f"\x1b[31m\x07{HOSTILE}"], "__proto__": [1], "modality": [HOSTILE]}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    twice = {"a.json": b'{"a":' * 2000 + b"1" + b"}" * 2000}
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name, content in [*twice.items(), ("a.txt", b"first"), ("a.txt", b"second")]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    for name, items in (("x.parquet", 2), ("x.tar", 2)):
        page = browse(tmp_path / name)
        foreign = watched(page)
        page.locator(".card").first.click()
        page.locator(".item").nth(items - 1).wait_for()
        until(page, "[...document.querySelectorAll('.item .body')].every(e => e.childElementCount > 0)")
        quiet(page)
        assert foreign == []
    assert page.get_by_text("first", exact=True).count() == 1
    page.get_by_text("It becomes no row: bad_json: ").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("1 repeated member (a.txt: ").wait_for()
