"""Fixtures of the whole suite: where the demo shards and the optional sample corpora are."""

from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
DEMO_SHARDS = REPO / "mm_assets" / "defs" / "demo" / "shards"


@pytest.fixture(scope="session")
def demo_shards() -> Path:
    """The folder of the five demo shards, which ship with the project."""
    return DEMO_SHARDS


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of larger sample corpora beside the checkout; tests that need it skip where it is absent."""
    folder = REPO.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the larger sample corpora are not beside this checkout")
    return folder


@pytest.fixture
def dagster_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty instance folder that $DAGSTER_HOME names."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.delenv("MM_ASSETS_ROOT", raising=False)
    return home
