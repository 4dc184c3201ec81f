"""The site that `make docs` builds: no warning or broken link, nothing from other hosts, a search without a server."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


class Page(HTMLParser):
    """What a built page refers to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        target = given.get("href") or given.get("src")
        if target is None:
            return
        if tag == "a":
            self.links.append(target)
        elif given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(target)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Page]:
    """The pages of the site by their files."""
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_page_of_the_documentation_is_in_the_site(site: Path) -> None:
    """Each Markdown file of docs/ is built; a page outside of the navigation is a warning, which fails the build."""
    docs = REPOSITORY / "docs"
    for page in docs.rglob("*.md"):
        assert (site / page.relative_to(docs).with_suffix(".html")).is_file(), page


def test_every_link_of_the_site_resolves(site: Path, pages: dict[Path, Page]) -> None:
    """Each relative link and each file that a page loads is there, and each anchor is in the page that it names."""
    broken = []
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            name, _, anchor = link.partition("#")
            if ":" in name:
                continue
            target = (path.parent / unquote(name)).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            found = target.is_relative_to(site.resolve()) and target.is_file()
            if not found or (anchor and target in pages and unquote(anchor) not in pages[target].anchors | {"__skip"}):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_every_block_of_code_is_one(site: Path) -> None:
    """No fence of a code block, and no row of a table, is left as text in a page."""
    left = []
    for path in site.rglob("*.html"):
        text = re.sub(r"<(pre|code|script)\b.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        left += [
            f"{path.relative_to(site)}: {line}" for line in text.splitlines() if "```" in line or "| --- |" in line
        ]
    assert left == []


def test_no_page_loads_anything_from_another_host(pages: dict[Path, Page]) -> None:
    """Scripts, styles, fonts and pictures of each page are files of the site."""
    assert {link for page in pages.values() for link in page.loaded if "//" in link} == set()
    assert {link for page in pages.values() for link in page.loaded if link.endswith(".js")} != set()


def test_the_search_index_is_a_script(site: Path) -> None:
    """The search has the sections of all pages in a script, which a page opened from a folder may load."""
    text = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    sections = json.loads(text.removeprefix("var __index = "))["docs"]
    found = {section["location"] for section in sections if "settle_seconds" in section["text"]}
    assert "settings.html#keys-of-a-dataset" in found


# --- found from the front page ----------------------------------------------------------------------------------------

TASKS = {
    "drop images under 256 px": (["Your own filter"], "min_width: 256, min_height: 256"),
    "export to WebDataset": (["Leave"], "mm-assets export webdataset leaving"),
    "resume on 4 GPUs": (["Train and resume"], "torchrun --nproc-per-node 4"),
    "S3 credentials": (["S3 credentials"], "export AWS_ACCESS_KEY_ID="),
    "see why a row was dropped": (["See why a row was dropped"], "mm-assets losses --dataset captions"),
    "try another filter after a run": (["Change filters after a run"], "mm-assets run --dry-run"),
    "run on Slurm": (["Many machines"], "sbatch"),
    "free disk space": (["Disk space and retention"], "mm-assets clean --dataset"),
    "the robot's state at a time": (["A robot dataset", "time"], "resample_to(state, camera)"),
    "the size of an image's record": (["Specifications and API", "Fields"], "num_frames"),
    "what a message means": (["Troubleshooting by message"], "is not a registered dataset"),
    "arguments of the loader": (["Specifications and API", "Loading"], "on_damaged"),
    "search by embeddings": (["Add embeddings, and search"], "array_cosine_similarity"),
    "use it in a Dagster project": (["In your own Dagster project"], "registry_modules"),
}
"""What a user wants to do: the links to click, from the front page on, and what is on the page at their end."""


class Article(HTMLParser):
    """The links of a page's own text, without navigation: target by text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: dict[str, list[str]] = {}
        self._open: tuple[str, list[str]] | None = None
        found = re.search(r"<article.*?</article>", text, flags=re.DOTALL)
        assert found is not None
        self.feed(found[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href")
        if tag == "a" and target is not None:
            self._open = target, []

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self._open[1].append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "a" and self._open is not None:
            target, words = self._open
            self.links.setdefault(" ".join("".join(words).split()), []).append(target)
            self._open = None


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_found_within_two_clicks(task: str, site: Path) -> None:
    """Links in the text lead from the front page to what the task needs."""
    clicks, needed = TASKS[task]
    assert len(clicks) <= 2
    places = [site / "index.html"]
    for click in clicks:
        targets = {
            (place.parent / link.partition("#")[0]).resolve() if link.partition("#")[0] else place
            for place in places
            for link in Article(place.read_text(encoding="utf-8")).links.get(click, ())
        }
        assert targets, f"{click!r} is not a link of {places}"
        places = sorted(targets)
    texts = [re.sub(r"<[^>]+>", "", place.read_text(encoding="utf-8")) for place in places]
    assert any(needed in text for text in texts), (task, places)


def test_llms_txt_names_every_page(site: Path) -> None:
    """Each Markdown file of docs/ is linked once, by a path that leads to it in the repository and in the site."""
    docs = REPOSITORY / "docs"
    linked = re.findall(r"\]\(([^)]+)\)", (docs / "llms.txt").read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))
    for name in linked:
        assert (site / name).read_bytes() == (docs / name).read_bytes()
    assert (site / "llms.txt").is_file()
