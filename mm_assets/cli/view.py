"""`mm-assets view`: a local web page over packed files, a dataset's folder, or shards before they are packed."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import partial

import click

from mm_assets.cli.options import field_option, parsed_options, storage_option
from mm_assets.cli.output import echo


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="X...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 takes a free one.")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="Another name of this machine in URLs.")
@click.option("--open/--no-open", "opens", default=False, help="Open the page in the default browser.")
@storage_option
@click.option("--allow", "allowed", multiple=True, metavar="PREFIX", help="Where a table's rows may name files.")
@field_option
def command(
    sources: tuple[str, ...],
    host: str,
    port: int,
    hosts: tuple[str, ...],
    opens: bool,
    storage_options: tuple[str, ...],
    allowed: tuple[str, ...],
) -> None:
    """Look at samples in a browser: packed files, a manifest, a dataset's folder, or shards that are not packed."""
    import secrets

    from mm_assets.view import build_app, open_backend, serve
    from mm_assets.view.server import bind, limit_memory, url_of

    options, report = parsed_options(storage_options), partial(echo, err=True)
    backend = open_backend(sources, storage_options=options, allowed=allowed, report=report)
    sock = bind(host, port)
    token = secrets.token_urlsafe(24)
    url = url_of(sock, host, token)
    echo(url)
    sys.stdout.flush()
    if opens:
        import webbrowser

        webbrowser.open(url)
    limit_memory()
    app = build_app(backend, token=token, hosts=[*hosts, host])
    with suppress(KeyboardInterrupt):
        serve(app, sock)
    sys.stdout.flush()
    os._exit(0)  # a thread may be waiting for a remote file, and there is nothing to save
