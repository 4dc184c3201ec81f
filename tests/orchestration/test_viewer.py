"""Links to the viewer."""

import pytest

from mm_assets.orchestration.viewer import VIEWER_VARIABLE, viewer_link


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


def test_no_viewer_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable there is no link."""
    monkeypatch.delenv(VIEWER_VARIABLE, raising=False)
    assert viewer_link("web", "a-1") is None
