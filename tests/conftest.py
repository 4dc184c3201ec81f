"""Options, profiles and fixtures of the whole suite."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import mm_assets

REPO = Path(__file__).resolve().parent.parent
DEMO_SHARDS = REPO / "mm_assets" / "defs" / "demo" / "shards"

# A shell lets what it runs in the background ignore these, and so would every process that a test starts and ends.
for _number, _effect in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _effect)

DEFAULT_EXAMPLES = 100  # of Hypothesis, where a test does not say how many it needs
settings.register_profile("nightly", max_examples=20 * DEFAULT_EXAMPLES)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The wheels under test, and what `tests/interop` needs."""
    parser.addoption("--wheels", metavar="FOLDER", help="test the wheels of this folder instead of building them")
    parser.addoption("--owners", metavar="PYTHON", help="run tests/interop with the libraries of this Python")
    parser.addoption("--lerobot", metavar="PYTHON", help="run tests/interop with the LeRobot of this Python")
    parser.addoption("--results", metavar="FILE", help="write to this file what tests/interop compared")


def pytest_report_header() -> str:
    """Which copy of the package is tested: the source tree's, or an installed wheel's."""
    return f"mm_assets {mm_assets.__version__} from {Path(mm_assets.__file__).parent}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raises the number of examples that property tests state by as much as the profile raises the default.

    A test whose examples take long states few, and how many `make nightly` draws as its marker ``nightly_examples``.
    """
    factor = settings().max_examples // DEFAULT_EXAMPLES
    if factor == 1:
        return
    marked = {item.function: m.args[0] for item in items for m in item.iter_markers("nightly_examples")}
    # Of a parametrised test many items share a function. Hypothesis has no public way to change a decorated test.
    for function in {item.function for item in items if isinstance(item, pytest.Function)}:
        stated = getattr(function, "_hypothesis_internal_use_settings", None)
        if stated is not None:
            raised = settings(stated, max_examples=marked.get(function, factor * stated.max_examples))
            function._hypothesis_internal_use_settings = raised


@pytest.fixture(scope="session")
def demo_shards() -> Path:
    """The folder of the five demo shards, which ship with the repository."""
    return DEMO_SHARDS


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of larger sample corpora beside the checkout; tests that need it skip where it is absent."""
    folder = REPO.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the larger sample corpora are not beside this checkout")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _no_instance_of_the_checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """$DAGSTER_HOME names an empty folder, so that no test finds the instance and the data of the checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("MM_ASSETS_ROOT", raising=False)
        yield


@pytest.fixture
def dagster_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty instance folder that $DAGSTER_HOME names."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.delenv("MM_ASSETS_ROOT", raising=False)
    return home
