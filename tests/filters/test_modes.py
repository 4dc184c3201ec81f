"""Filters on rows of real shards, content at hand or fetched late: several modules, from tar to filtered rows."""

from pathlib import Path

import pyarrow as pa
import pytest

from mm_assets.filters.apply import FilterStream
from mm_assets.filters.registry import build_annotator, build_filter
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.materialize import MaterializeStream
from mm_assets.rows.parquet import sample_groups
from mm_assets.rows.schema import DatasetSchema, MemberRules
from mm_assets.sources.base import index_members
from mm_assets.sources.tar import TarSource
from mm_assets.storage.files import SourceFile

BATCH = 1 << 18  # so small that a shard gives several blocks


@pytest.mark.parametrize("shard", ["captions-00000.tar", "docs-00000.tar", "speech-00000.tar"])
def test_a_real_shard_gives_the_same_rows_in_both_modes(demo_shards: Path, shard: str):
    """From tar to filtered rows, content at hand and content fetched late give equal tables and equal drops."""
    annotators = [{"type": "text_length"}, {"type": "image_size"}, {"type": "content_hash"}]
    filters = [
        {"type": "aspect_ratio", "min": 0.5, "max": 1.5},
        {"type": "text_length", "min_words": 3},
        {"type": "blur", "min": 300},
        {"type": "audio_duration", "max_seconds": 3},
        {"type": "exact_duplicates", "scope": "row"},
    ]

    def filtered(*, late: bool) -> tuple[pa.Table, list[tuple], dict[str, int]]:
        made = [build_annotator(c, where="w", key="k") for c in annotators]
        schema = DatasetSchema(annotator_columns=tuple(c for a in made for c in a.columns))
        with SourceFile(str(demo_shards / shard)) as source:
            tar = TarSource(source)
            rows = MemberRows([tar]).rows(
                lambda: index_members(tar), layout=MemberRules(user_columns=()), schema=schema, batch_bytes=BATCH
            )

            def fill(batches):
                return MaterializeStream(batches, open_file=lambda _: source, allowed=lambda _: True, batch_bytes=BATCH)

            stream = FilterStream(
                sample_groups(rows if late else fill(rows), batch_bytes=BATCH),
                annotators=made,
                filters=[build_filter(c, where="w", key="k") for c in filters],
                schema=schema,
                fetch=fill if late else None,
                batch_bytes=BATCH,
            )
            kept = pa.Table.from_batches(list(stream), schema=schema.filtered_schema())
        dropped = [tuple(row.values()) for part in stream.take_dropped() for row in part.to_pylist()]
        return kept, sorted(dropped), stream.counts

    here, late = filtered(late=False), filtered(late=True)
    assert here[0].equals(late[0])
    assert here[1:] == late[1:]
    assert here[2]["kept"] > 0
    assert here[2]["dropped"] > 0
