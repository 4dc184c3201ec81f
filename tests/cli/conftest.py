"""What the tests of commands share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_project_of_another_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of a project that a test makes end with it: a command imports them by name, as other processes do not."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name, module in [*sys.modules.items()]:
        own = getattr(module, "__dict__", {})  # some modules have any attribute that is asked for; some are None
        places = [own.get("__file__") or "", *own.get("__path__", ())]
        if any(str(place).startswith(f"{tmp_path}/") for place in places):
            del sys.modules[name]
