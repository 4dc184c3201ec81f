"""`mm-assets seen`: which samples a training run has seen, by the state of its loader."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mm_assets.cli.document import json_option, wants_json, write_document
from mm_assets.cli.options import field_option, parsed_options, storage_option
from mm_assets.cli.sql import check_format, json_result, print_result
from mm_assets.errors import ConfigError, LoaderError

if TYPE_CHECKING:
    from mm_assets.loading.loader import MultimodalLoader
    from mm_assets.loading.mixed_loader import MixedLoader

MAX_STATE_BYTES = 64 << 20


@click.command()
@click.argument("state")
@click.argument("query", required=False)
@click.option("--recipe", metavar="FILE", help="The recipe of the run, if STATE is that of a mix.")
@click.option("--dataset", metavar="PATH", help="The packed file, manifest or folder of the run, if it is not a mix.")
@click.option("--where", metavar="SQL", help="With --dataset: the view of it that was loaded, as in `Dataset.filter`.")
@click.option("--world-size", type=click.IntRange(1), metavar="N", help="Ranks of the run; without it `rank` is null.")
@click.option("--rank", type=click.IntRange(0), metavar="R", help="Only what this rank has seen.")
@click.option(
    "--batch-size", type=click.IntRange(1), metavar="B", help="Samples of a batch, unless the recipe says it."
)
@click.option("--since", metavar="STATE", help="An earlier state: only what was seen after it.")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values; the default where no terminal reads them.")
@field_option
@storage_option
@json_option
def command(
    state: str,
    query: str | None,
    recipe: str | None,
    dataset: str | None,
    where: str | None,
    world_size: int | None,
    rank: int | None,
    batch_size: int | None,
    since: str | None,
    as_csv: bool,
    storage_options: tuple[str, ...],
) -> None:
    """Run QUERY over the samples that a training run has seen; without QUERY, count them by source.

    STATE is a JSON file with the `state_dict` of a `MultimodalLoader` or of a mix. The samples follow from the loader's
    plan, without a log. The tables are seen (source, epoch, position, mix_position, rank, index, sample_id, partition),
    a row for each time that a sample was delivered, and samples (source, index, sample_id, partition, times_seen).
    Epochs that a run left early count as a whole; of ranks whose number has changed, each part is from --since on.
    """
    check_format(as_csv=as_csv)
    if (recipe is None) == (dataset is None):
        raise ConfigError("arguments", "--recipe, --dataset", "expected one of them")
    if rank is not None and (world_size is None or rank >= world_size):
        raise ConfigError("arguments", "--rank", f"found {rank}, expected a number below --world-size")
    after = _read_state(state)
    with _opened(after, recipe, dataset, where, batch_size, parsed_options(storage_options)) as loader:
        before = None
        if since is not None:
            loader.load_state_dict(before := _read_state(since))
        loader.load_state_dict(after)
        _run(loader, before, query or _SUMMARY, name=dataset or "", world_size=world_size, rank=rank, as_csv=as_csv)


def _run(
    loader: MultimodalLoader | MixedLoader,
    since: Mapping[str, Any] | None,
    query: str,
    *,
    name: str,
    world_size: int | None,
    rank: int | None,
    as_csv: bool,
) -> None:
    import duckdb

    from mm_assets.loading.seen import scan_samples, scan_seen

    with (
        tempfile.TemporaryDirectory(prefix="mm-assets-") as folder,
        closing(duckdb.connect(str(Path(folder, "seen.duckdb")))) as connection,  # a file, so that memory is bounded
    ):
        connection.execute(_TABLES)
        tables = {"delivered": scan_seen(loader, since, name=name, world_size=world_size)}
        tables["ids"] = scan_samples(loader, name=name)
        for table, parts in tables.items():
            for part in parts:
                connection.register("part", part)
                is_chosen = f"where rank = {rank}" if rank is not None and table == "delivered" else ""
                connection.execute(f"insert into {table} select * from part {is_chosen}")
                connection.unregister("part")
        connection.execute(_VIEWS)
        try:
            cursor = connection.execute(query)
            if cursor is None:  # so answers DuckDB to a text without a statement
                raise ConfigError("arguments", "QUERY", f"found {query!r}, expected SQL such as {_EXAMPLE!r}")
            if wants_json():
                write_document(json_result(cursor))
            else:
                print_result(cursor, as_csv=as_csv)
        except duckdb.Error as error:
            raise ConfigError("arguments", "QUERY", str(error)) from error


_EXAMPLE = "select count(*) from seen"
_TABLES = """
create table delivered (
    source varchar, epoch bigint, position bigint, mix_position bigint, rank integer, "index" bigint
);
create table ids (source varchar, "index" bigint, sample_id varchar, partition varchar);
"""
_VIEWS = """
create table samples as
select ids.*, coalesce(times, 0) as times_seen
from ids left join (select source, "index", count(*) as times from delivered group by all) using (source, "index");
create view seen as
select delivered.*, sample_id, partition from delivered join ids using (source, "index");
"""
_SUMMARY = """
select source, count(*) as samples, count(*) filter (times_seen > 0) as seen, sum(times_seen)::bigint as times,
    min(times_seen) as least, max(times_seen) as most
from samples group by source order by source
"""


@contextmanager
def _opened(
    state: Mapping[str, Any],
    recipe: str | None,
    dataset: str | None,
    where: str | None,
    batch_size: int | None,
    options: Mapping[str, Any],
) -> Iterator[MultimodalLoader | MixedLoader]:
    """Opens the loader of a state, as a single rank."""
    import mm_assets
    from mm_assets.loading.order import Blocks

    sizes: dict[str, Any] = {} if batch_size is None else {"batch_size": batch_size}
    if options:
        sizes["storage_options"] = options
    if recipe is not None:
        with mm_assets.mix(recipe, rank=0, world_size=1, **sizes) as mixed:
            yield mixed
        return
    if "recipe" in state:
        raise ConfigError("arguments", "--dataset", "is given, and STATE is that of a mix: give its --recipe")
    shuffle, seed = state.get("shuffle", True), state.get("seed", 0)
    if isinstance(shuffle, list) and len(shuffle) == 2:
        shuffle = Blocks(*shuffle)
    with mm_assets.open(dataset or "", storage_options=options or None) as opened:
        view = opened if where is None else opened.filter(where)
        sizes.pop("storage_options", None)
        yield mm_assets.MultimodalLoader(view, shuffle=shuffle, seed=seed, rank=0, world_size=1, **sizes)


def _read_state(file: str) -> Mapping[str, Any]:
    path = Path(file)
    if path.stat().st_size > MAX_STATE_BYTES:
        raise LoaderError(f"{file}: found more than {MAX_STATE_BYTES:,} bytes, expected a loader's state")
    try:
        state = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise LoaderError(f"{file}: is not JSON, expected a loader's state: {error}") from error
    if not isinstance(state, dict):
        raise LoaderError(f"{file}: expected a loader's state, a JSON object")
    return state
