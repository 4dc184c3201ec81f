"""`mm-assets card`: a README and a Croissant description of a dataset."""

from __future__ import annotations

import click

from mm_assets.cli.document import json_option, write_document
from mm_assets.cli.options import field_option, parsed_options, storage_option
from mm_assets.cli.output import echo


@click.command()
@click.argument("source", metavar="SOURCE")
@click.argument("out", metavar="OUT")
@click.option("--license", metavar="NAME", help="License of the whole dataset: an SPDX identifier or a URL.")
@click.option("--description", metavar="TEXT", help="One or several sentences.")
@click.option("--url", metavar="URL", help="Where the dataset is published.")
@click.option("--cite-as", metavar="TEXT", help="Citation, such as a BibTeX entry.")
@click.option("--date-published", metavar="DATE", help="An ISO 8601 date.")
@click.option("--overwrite", is_flag=True, help="Replace existing files with other content.")
@field_option
@storage_option
@json_option
def command(
    source: str,
    out: str,
    license: str | None,
    description: str | None,
    url: str | None,
    cite_as: str | None,
    date_published: str | None,
    overwrite: bool,
    storage_options: tuple[str, ...],
) -> None:
    """Describe the dataset at SOURCE, a manifest or folder, in README.md and croissant.json in the folder OUT.

    They list its fields, licenses, counts, statistics, digests and settings. In the dataset's own folder,
    croissant.json also lets tools that support Croissant 1.1 read the rows of the samples.
    """
    from mm_assets.dataset.card import dataset_card
    from mm_assets.errors import ConfigError
    from mm_assets.storage.store import Store

    options = parsed_options(storage_options)
    card = dataset_card(
        source,
        license=license,
        description=description,
        url=url,
        cite_as=cite_as,
        date_published=date_published,
        storage_options=options or None,
    )
    store = Store(out, options)
    files = card.files()
    for name, content in files.items():
        if not overwrite and store.found_bytes(name) not in (None, content):
            raise ConfigError("arguments", "OUT", f"{store.url_of(name)} has other content: --overwrite replaces it")
    for name, content in files.items():
        store.write_bytes(name, content)
    echo(f"{store.url}: {', '.join(files)}")
    write_document({"url": store.url, "files": list(files)})
