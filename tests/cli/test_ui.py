"""`mm-assets ui`: what its process of Dagster inherits."""

import os
import signal
import sys

import pytest

from mm_assets.cli import ui

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
