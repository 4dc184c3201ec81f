"""`mm-assets ui`: what its process of Dagster is given."""

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Queue

import pytest
from click.testing import CliRunner

from mm_assets.cli import ui
from mm_assets.cli.project import definitions_modules, make_project
from mm_assets.orchestration.viewer import claim_viewer

IGNORES = "import signal, sys; sys.exit(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"


def test_dagster_hears_an_interrupt_where_a_script_ignores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by `&` of a script, the command has Dagster take SIGINT: by it Dagster ends its own processes."""
    monkeypatch.setattr("mm_assets.view.server.limit_memory", lambda: None)  # it would hold for the other tests too
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert ui._run([sys.executable, "-c", IGNORES], dict(os.environ)) == 0
    finally:
        for number, handler in before:
            signal.signal(number, handler)


CREATE_DAGSTER = """
[project]
name = "my_project"

[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "packed_datasets"
"""
TARGET = "packed_datasets.definitions"


@pytest.mark.parametrize(
    ("file", "text", "location"),
    [
        ("pyproject.toml", CREATE_DAGSTER, "my-project"),  # the folder's, as `dg dev` has it
        ("pyproject.toml", f'{CREATE_DAGSTER}code_location_name = "ours"', "ours"),
        ("dg.toml", None, TARGET),  # as `mm-assets init --project` writes it
    ],
)
def test_the_code_location_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str | None, location: str
) -> None:
    """Dagster loads it under the name of `dg dev` and `dagster dev`, by which it stores which sensors are on."""
    folder = tmp_path / "my-project"
    make_project(folder)
    if text is not None:
        (folder / "dg.toml").unlink()
        (folder / file).write_text(text)
    workspaces = []

    def run(words: Sequence[str], _environment: Mapping[str, str]) -> int:
        workspaces.append(json.loads(Path(words[words.index("-w") + 1]).read_text()))
        return 0

    monkeypatch.setattr(ui, "_run", run)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MM_ASSETS_VIEWER_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(ui.command, ["--port", str(_free_port())])
    assert result.exit_code == 0, result.output
    assert workspaces == [{"load_from": [{"python_module": {"module_name": TARGET, "location_name": location}}]}]


@pytest.mark.parametrize("is_moved", [True, False])
def test_another_port_of_the_viewer_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_moved: bool) -> None:
    """Links that are stored with events lead to the port of the start before, which is named if it is another."""
    make_project(tmp_path / "project")
    port, home = _free_port(), tmp_path / "home"
    home.mkdir()
    claim_viewer(home, f"http://127.0.0.1:{3001 if is_moved else port}")
    served: Queue[socket.socket] = Queue()
    monkeypatch.setattr("mm_assets.view.serve", lambda _app, sock: served.put(sock))
    monkeypatch.setattr(ui, "_run", lambda _words, _environment: served.get(timeout=10).close() or 0)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.delenv("MM_ASSETS_VIEWER_URL", raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    result = CliRunner().invoke(ui.command, ["--port", str(_free_port()), "--viewer-port", str(port)])
    assert result.exit_code == 0, result.output
    note = "note: links of earlier runs lead to 127.0.0.1:3001: --viewer-port 3001 has them open\n"
    assert result.stderr == (note if is_moved else "")


def test_a_workspace_names_its_code_locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of a workspace without a name for its location has its own, as in `dagster dev`."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    entries = "[python_module: a.definitions, python_module: {module_name: b.definitions, location_name: ours}]"
    (tmp_path / "workspace.yaml").write_text(f"load_from: {entries}")
    assert definitions_modules(tmp_path) == {"a.definitions": "a.definitions", "b.definitions": "ours"}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
