"""`mm-assets ui`: Dagster's pages, and beside them a viewer that their links open."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from mm_assets.cli.options import DatasetChoice
from mm_assets.cli.output import echo
from mm_assets.errors import SourceError

if TYPE_CHECKING:
    from mm_assets.pipeline.spec import DatasetSpec
    from mm_assets.view import Backend

_PATIENCE = 15.0  # seconds that Dagster has to end, after which it is killed
_OTHER = "name another one"
# What Dagster warns of its own use of its own code; a filter's message is the start of the warning's.
_IGNORED = "ignore:Function `dev_command` is superseded,ignore:Parameter `owners` of initializer"


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--module", "-m", help="Definitions module; by default that of the project around this folder.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that both listen on.")
@click.option("--port", default=3000, show_default=True, type=click.IntRange(1, 65535), help="Port of Dagster's pages.")
@click.option("--viewer-port", type=click.IntRange(1, 65535), help="Port of the viewer. Default: 3001.")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="Another name of this machine in URLs.")
@click.argument("dagster_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS OF DAGSTER DEV]")
def command(
    module: str | None,
    host: str,
    port: int,
    viewer_port: int | None,
    hosts: tuple[str, ...],
    dagster_arguments: Sequence[str],
) -> None:
    """Start Dagster's pages and daemon, and a viewer of all datasets that their links open.

    The links lead to the viewer from the first start on, also those of runs that other commands start. With
    MM_ASSETS_VIEWER_URL set, they lead there and no viewer is started.
    """
    from mm_assets.cli.project import definitions_modules, import_places
    from mm_assets.orchestration.viewer import VIEWER_PORT, VIEWER_VARIABLE
    from mm_assets.view.server import bind

    specs = DatasetChoice(module=module).specs()
    locations = {module: module} if module is not None else definitions_modules(Path.cwd())
    bind(host, port, advice=_OTHER).close()  # Dagster's other processes would run on without the pages
    if not os.environ.get(VIEWER_VARIABLE):
        _start_viewer(specs, host, viewer_port or VIEWER_PORT, hosts)
    echo(f"Dagster: http://{host}:{port}")
    sys.stdout.flush()
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *import_places(Path.cwd())]))
    warnings = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), _IGNORED]))
    with tempfile.TemporaryDirectory(prefix="mm-assets-ui-") as folder:
        workspace = Path(folder, "workspace.yaml")  # Dagster's options name modules, and not their code locations
        entries = [{"python_module": {"module_name": m, "location_name": name}} for m, name in locations.items()]
        workspace.write_text(json.dumps({"load_from": entries}), encoding="utf-8")
        dagster = [sys.executable, "-m", "dagster", "dev", "--host", host, "--port", str(port), "-w", str(workspace)]
        code = _run([*dagster, *dagster_arguments], {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": warnings})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread of the viewer may be waiting for a remote file, and there is nothing to save


def _start_viewer(specs: Sequence[DatasetSpec], host: str, port: int, hosts: Sequence[str]) -> None:
    from mm_assets.orchestration.viewer import claim_viewer, viewer_link
    from mm_assets.view import build_datasets_app, serve
    from mm_assets.view.server import bind, url_of

    sock = bind(host, port, option="--viewer-port", advice=_OTHER)
    home = Path(os.environ["DAGSTER_HOME"])
    before, address = urlsplit(viewer_link("") or ""), url_of(sock, host, "").partition("/?")[0]
    token = claim_viewer(home, address)
    app = build_datasets_app({spec.name: partial(_opened, spec) for spec in specs}, token=token, hosts=[*hosts, host])
    threading.Thread(target=serve, args=(app, sock), name="viewer", daemon=True).start()
    echo(f"Samples: {url_of(sock, host, token)}")
    if before.netloc not in ("", urlsplit(address).netloc):
        echo(
            f"note: links of earlier runs lead to {before.netloc}: --viewer-port {before.port} has them open", err=True
        )


def _opened(spec: DatasetSpec) -> Backend:
    from mm_assets.pipeline.state.folder import DatasetStore
    from mm_assets.view import open_backend

    dataset = DatasetStore(spec)
    if dataset.registered().source is None:
        raise SourceError(dataset.store.url, f"is not registered yet: run `mm-assets register --dataset {spec.name}`")
    return open_backend([dataset.store.url], storage_options=spec.root_options)


def _run(words: Sequence[str], environment: dict[str, str]) -> int:
    """Runs Dagster until it ends or this process is stopped; 0 where Dagster ended well or was stopped, else 1."""
    from mm_assets.view.server import limit_memory

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a script's `&` starts a command; Dagster ends by it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    dagster = subprocess.Popen(words, env=environment)
    limit_memory()  # of the viewer, which shows content that was never checked; Dagster has started before

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        code = dagster.wait()
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):  # a second one does not wait
            dagster.terminate()
            dagster.wait(_PATIENCE)
        dagster.kill()
        return 0
    return 1 if code else 0
