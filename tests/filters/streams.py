"""Runs of filters and annotators over blocks."""

from collections.abc import Iterable, Mapping

from mm_assets.filters.apply import FilterStream
from mm_assets.filters.base import Block, Filter
from mm_assets.filters.registry import build_filter
from mm_assets.rows.schema import DatasetSchema, Drop


def declared(**config: object) -> Filter:
    return build_filter(config, where="defs.yaml", key="filters[0]")


def run_stream(stream: FilterStream) -> tuple[list[dict], list[dict]]:
    kept, dropped = [], []
    for batch in stream:
        kept += batch.to_pylist()
        dropped += [row for part in stream.take_dropped() for row in part.to_pylist()]
    dropped += [row for part in stream.take_dropped() for row in part.to_pylist()]
    return kept, dropped


def key_of(row: Mapping) -> tuple[str, int, str]:
    return row["sample_id"], row["position"], row["modality"]


def apply(blocks, *, filters=(), annotators=(), schema=None, **options) -> FilterStream:
    return FilterStream(blocks, annotators=annotators, filters=filters, schema=schema or DatasetSchema(), **options)


class Marked(Filter):
    """Drops the rows whose text holds a mark, and counts the blocks that it was shown."""

    name = "marked"

    def __init__(self, *, mark: str = "x", scope: str = "row", late: bool = False) -> None:
        self.mark = mark
        self.scope = scope
        self.needs_content = late
        self.seen = 0

    def judge(self, block: Block) -> Iterable[Drop]:
        self.seen += 1
        for row, text in enumerate(block.column("text_content").to_pylist()):
            if text is not None and self.mark in text:
                yield Drop(row, f"has_{self.mark}", float(text.index(self.mark)))
