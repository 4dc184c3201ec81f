"""Links to the viewer."""

from pathlib import Path

import pytest

from mm_assets.orchestration.launch import open_instance
from mm_assets.orchestration.viewer import VIEWER_VARIABLE, claim_viewer, viewer_link


@pytest.mark.parametrize(
    ("base", "sample", "link"),
    [
        ("http://127.0.0.1:8000", None, "http://127.0.0.1:8000/?part=a-1"),
        ("http://127.0.0.1:8000/", "x/y z", "http://127.0.0.1:8000/?page=open&partition=a-1&sample_id=x%2Fy%20z"),
        (
            "https://view.example.org/{dataset}",
            "é#",
            "https://view.example.org/web/?page=open&partition=a-1&sample_id=%C3%A9%23",
        ),
        ("http://h/?token=t", None, "http://h/?token=t&part=a-1"),
        ("", None, None),
        ("javascript:alert(1)", None, None),
        ("file:///etc", "x", None),
    ],
)
def test_links(monkeypatch: pytest.MonkeyPatch, base: str, sample: str | None, link: str | None) -> None:
    """A partition and a sample have a page each, whose address has nothing of the id unquoted; other schemes none."""
    monkeypatch.setenv(VIEWER_VARIABLE, base)
    assert viewer_link("web", "a-1", sample) == link


def test_no_viewer_no_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the variable, in an instance of other commands alone, there is no link."""
    monkeypatch.delenv(VIEWER_VARIABLE, raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    assert viewer_link("web", "a-1") is None


def test_the_viewer_of_the_instance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Links lead to the viewer that was started last, with the token that the first had; the variable goes before."""
    monkeypatch.delenv(VIEWER_VARIABLE, raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    token = claim_viewer(tmp_path, "http://127.0.0.1:3001")
    assert len(token) > 20
    assert claim_viewer(tmp_path, "http://127.0.0.1:3005") == token
    assert viewer_link("web", "a-1") == f"http://127.0.0.1:3005/web/?t={token}&part=a-1"
    assert viewer_link("web") == f"http://127.0.0.1:3005/web/?t={token}"
    (stored,) = tmp_path.iterdir()
    assert stored.stat().st_mode & 0o077 == 0
    monkeypatch.setenv(VIEWER_VARIABLE, "")
    assert viewer_link("web") is None


def test_links_lead_to_the_viewer_before_its_first_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the command line packs has links before `mm-assets ui` was started, with the token that it will have."""
    monkeypatch.delenv(VIEWER_VARIABLE, raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with open_instance():
        link = viewer_link("web", "a-1")
    token = claim_viewer(tmp_path, "http://127.0.0.1:3001")
    assert link == viewer_link("web", "a-1") == f"http://127.0.0.1:3001/web/?t={token}&part=a-1"
    claim_viewer(tmp_path, "http://127.0.0.1:3009")
    with open_instance():
        assert viewer_link("web", "a-1") == f"http://127.0.0.1:3009/web/?t={token}&part=a-1"
