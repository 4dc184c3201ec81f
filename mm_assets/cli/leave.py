"""`mm-assets leave`: writes a script that converts packed files to tars without this project."""

from __future__ import annotations

import json
import posixpath
from importlib.resources import files

import click

from mm_assets.cli.document import json_option, write_document
from mm_assets.cli.output import echo
from mm_assets.summaries import counted

_FILES = "FILES: list = []"  # the line of the script that lists the packed files


@click.command()
@click.argument("manifest", metavar="MANIFEST")
@json_option
def command(manifest: str) -> None:
    """Write leave.py next to MANIFEST: 100 lines of Python that convert the packed files to WebDataset tars.

    It needs only Python, now or in ten years: `python leave.py FOLDER`.
    """
    from mm_assets.dataset.dataset import open as open_dataset
    from mm_assets.storage.store import Store

    with open_dataset(manifest) as dataset:
        packed = list(dataset.files)
    folder = Store(posixpath.dirname(manifest) or ".")
    names = [posixpath.relpath(path, folder.url) for path in packed]
    script = files("mm_assets.exports").joinpath("leave.py").read_text(encoding="utf-8")
    value = json.dumps(names, ensure_ascii=True)
    folder.write_bytes("leave.py", script.replace(_FILES, f"FILES: list = {value}").encode())
    url = folder.url_of("leave.py")
    echo(
        f"{url}: run it with `python leave.py FOLDER`; it writes a tar for each of {counted(len(names), 'packed file')}"
    )
    write_document({"script": url, "files": names})
