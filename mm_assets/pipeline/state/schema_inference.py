"""The layout of a dataset: its user columns and pack plan, decided from a sample of its shards.

The sample is bounded and follows from the list of shards alone: some of them, spread evenly with the first and the last
among them, and the first samples of each. What most samples are decides; what is odd is listed and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mm_assets.errors import ConfigError, CredentialsError, LazyModule, SourceError, install_command
from mm_assets.media.pdf import can_read_pdf
from mm_assets.packing.kinds import Kind, RowCount, SampleKind, group_name, shown_role
from mm_assets.packing.plan import NUMBERED, PackPlan
from mm_assets.packing.presets import chooses_preset, plan_of, survey_for
from mm_assets.packing.survey import Survey
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.rows.base import TableSource, row_sources
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.sample import first_samples
from mm_assets.rows.schema import DatasetSchema, PdfRows, UserColumn
from mm_assets.rows.user_columns import ColumnTally
from mm_assets.sources.member import is_numbered
from mm_assets.sources.parquet import ParquetSource
from mm_assets.storage.read_ahead import HeldFile
from mm_assets.summaries import counted

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = LazyModule("pyarrow.compute")

__all__ = ["Decision", "decide_layout"]

MAX_SHARDS = 16
MAX_SAMPLES = 1024  # over all sampled shards
MAX_BYTES = 256 << 20  # decompressed of compressed shards, over all of them
MAX_READS = 128  # of blocks of shards that are not compressed, over all of them
MAX_TRIED = 64  # shards that are opened where the sampled ones have no sample
MAX_LISTED = 32  # kinds of sample that the evidence lists
MAX_SAID = 5  # odd kinds of sample that notes name


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledShard:
    """A shard of the sample.

    Attributes:
        url: path or URL.
        num_samples: samples that were read of it.
        error: why it could not be read, or None.
        undecoded: members of them whose text is in no encoding that counts.
    """

    url: str
    num_samples: int = 0
    error: str | None = None
    undecoded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKind:
    """Content rows of one modality and role in the sample.

    Attributes:
        modality, role: of the rows; the role is "#" for numbers.
        num_samples, num_rows: how many samples have them, and how many rows there are.
        extensions: extension of the member's name, "" where it has none, to rows.
        packed_as: the packed modalities, or parts of one as ``clip.video``, that take them; none: they are dropped.
    """

    modality: str
    role: str
    num_samples: int
    num_rows: int
    extensions: Mapping[str, int]
    packed_as: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnEvidence:
    """Why a user column has its type.

    Attributes:
        name, source, type: as in `UserColumn`.
        num_samples: samples that have the key; of a column of items, how many items there are.
        types: type to the number of values.
    """

    name: str
    source: str
    type: str
    num_samples: int
    types: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A dataset's layout, and why it is so.

    Attributes:
        schema: the layout.
        num_shards: shards of the dataset.
        shards: those of the sample.
        kinds: the kinds of sample, the most frequent first.
        row_kinds: the kinds of row, the most frequent first.
        columns: the user columns.
        remarks: what else a user should know.
    """

    schema: DatasetSchema
    num_shards: int
    shards: tuple[SampledShard, ...]
    kinds: tuple[SampleKind, ...]
    row_kinds: tuple[RowKind, ...]
    columns: tuple[ColumnEvidence, ...]
    remarks: tuple[str, ...] = ()

    @property
    def decided_by(self) -> str | None:
        """The first shard that has samples; None where none has any, so that the decision is provisional."""
        return next((shard.url for shard in self.shards if shard.num_samples), None)

    @property
    def num_samples(self) -> int:
        """Samples that were read."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def notes(self) -> tuple[str, ...]:
        """What users should know: shards and texts that cannot be read, odd samples, settings that seem to be wrong."""
        unread = tuple(f"the layout was decided without an unreadable shard: {s.error}" for s in self.shards if s.error)
        kinds = [kind for kind in self.kinds if not kind.fits]
        odd = tuple(map(self._said, kinds[:MAX_SAID]))
        more = (f"and {len(kinds) - MAX_SAID:,} more kinds of sample",) if len(kinds) > MAX_SAID else ()
        return unread + self._undecoded + odd + more + self.remarks

    @property
    def _undecoded(self) -> tuple[str, ...]:
        """The texts that are rejected unless the declaration changes, in a sentence; nothing without any."""
        members = [(shard.url, member) for shard in self.shards for member in shard.undecoded]
        if not members:
            return ()
        (url, first), texts = members[0], counted(len(members), "sampled text")
        return (f"{texts} cannot be decoded, the first is {first} of {url}: name their encoding as samples.encoding",)

    def _said(self, kind: SampleKind) -> str:
        num_samples, total = f"{kind.num_samples:,}", counted(self.num_samples, "sampled sample")
        lost = f"; {', '.join(kind.unplaced)} would be dropped" if kind.unplaced else ""
        said = f"{num_samples} of {total} consist of {kind} and decided nothing{lost}"
        by_file: dict[str | None, list[str]] = {}
        for member, file in kind.members:
            by_file.setdefault(file, []).append(member)
        first = "; ".join(f"{', '.join(members)} of {file}" for file, members in by_file.items())
        return f"{said}. The first: {first}" if first else said

    def evidence(self) -> dict[str, Any]:
        """The evidence as `schema.json` holds it."""
        return {
            "num_shards": self.num_shards,
            "shards": [
                {"url": s.url, "num_samples": s.num_samples, **({} if s.error is None else {"error": s.error})}
                for s in self.shards
            ],
            "sample_kinds": [
                {
                    "kind": [{"modality": m, "role": role, "many": many} for m, role, many in found.kind],
                    "num_samples": found.num_samples,
                    "fits": found.fits,
                    "members": [f"{member} of {file}" for member, file in found.members],
                    "unplaced": list(found.unplaced),
                }
                for found in self.kinds[:MAX_LISTED]
            ],
            "row_kinds": [
                {
                    "modality": found.modality,
                    "role": found.role,
                    "num_samples": found.num_samples,
                    "num_rows": found.num_rows,
                    "extensions": [{"extension": name, "num_rows": n} for name, n in found.extensions.items()],
                    "packed_as": list(found.packed_as),
                }
                for found in self.row_kinds[:MAX_LISTED]
            ],
            "columns": [
                {
                    "name": column.name,
                    "num_samples": column.num_samples,
                    "types": [{"type": name, "num_values": n} for name, n in column.types.items()],
                }
                for column in self.columns
            ],
        }


def decide_layout(spec: DatasetSpec, urls: Sequence[str]) -> Decision:
    """Decides a dataset's layout from the declaration and a sample of its shards.

    A shard that cannot be read fails its own partition when that is run; here it decides nothing.

    Args:
        spec: the declaration.
        urls: its shards, sorted.

    Raises:
        SourceError: none of the shards that were tried can be read; it is the error of the first.
        MissingColumnError: no sample has a column that is requested.
        ConfigError: a pack field or column is not possible.
    """
    declared = spec.samples.pdf
    sampler = _sample(spec, urls, "binary" if declared == "auto" else declared)
    preset = spec.pack.get("preset") if isinstance(spec.pack, Mapping) else spec.pack
    is_open = declared == "auto" and "pdf" not in spec.samples.extensions
    if is_open and (chooses_preset(spec.pack) or preset in ("document", "interleaved")) and sampler.survey.is_of_pdfs:
        if can_read_pdf():
            sampler = _sample(spec, urls, "interleaved" if preset == "interleaved" else "document")
        else:
            sampler.remarks.append(
                f"most of {counted(sampler.survey.num_samples, 'sampled sample')} consist of a PDF, which is packed as "
                f"bytes: for its pages and words `{install_command('pypdfium2')}` on every host that runs partitions, "
                "and register with --new-schema; `samples.pdf: binary` ends this note"
            )
    if sampler.problems and not sampler.survey.num_samples and all(shard.error for shard in sampler.shards):
        first, number = sampler.problems[0], len(sampler.problems)
        if number == 1:
            raise first
        detail = f"{first.detail} (and none of the other {number - 1:,} shards that were tried can be read)"
        raise SourceError(first.path, detail, byte_offset=first.byte_offset) from first
    return sampler.decide(len(urls))


def _sample(spec: DatasetSpec, urls: Sequence[str], pdf: PdfRows) -> _Sampler:
    sampler = _Sampler(spec, pdf)
    sampled = _spread(urls, MAX_SHARDS)
    for url in sampled:
        sampler.read(url, len(sampled))
    others = (url for url in urls if url not in set(sampled))
    for url in islice(others, MAX_TRIED - len(sampled)):
        if sampler.survey.num_samples:
            break
        sampler.read(url, MAX_SHARDS)
    return sampler


def _spread(urls: Sequence[str], limit: int) -> list[str]:
    """At most `limit` of the shards, evenly spread, the first and the last among them."""
    if len(urls) <= limit:
        return list(urls)
    return [urls[number * (len(urls) - 1) // (limit - 1)] for number in range(limit)]


class _Sampler:
    """Reads samples of shards and counts them."""

    def __init__(self, spec: DatasetSpec, pdf: PdfRows) -> None:
        self.spec = spec
        self.pdf = pdf
        self.remarks: list[str] = []
        self.survey: Survey = survey_for(spec.pack, where=spec.where, roles=spec.samples.roles)
        self.shards: list[SampledShard] = []
        self.problems: list[SourceError] = []
        self._of_kind: dict[Kind, ColumnTally] = {}  # the JSON of samples
        self._of_tables = ColumnTally(spec.samples)
        self._num_listed = 0  # samples of tables
        self._number = 0  # of the last sample or row of a table

    def read(self, url: str, num_shards: int) -> None:
        """Counts the first samples of a shard, of which `num_shards` share the sample."""
        before = self.survey.num_samples
        error: str | None = None
        rejects: list[pa.Table] = []
        try:
            with HeldFile(url, self.spec.storage_options) as file:
                (rows_of,) = row_sources([file], self.spec.source, shards=self.spec.shards, where=self.spec.where)
                if self.spec.samples.roles is not None and any(isinstance(s, ParquetSource) for s in rows_of.sources):
                    detail = f"is set, but the members of {url} are named after its columns: leave it out for Parquet"
                    raise ConfigError(self.spec.where, "samples.roles", detail)
                self._count(rows_of, url, num_shards, rejects)
        except CredentialsError:  # what no shard can decide without them is not decided
            raise
        except SourceError as problem:
            self.problems.append(problem)
            error = str(problem)
        undecoded = [
            row["member"] or row["detail"].partition(":")[0]
            for table in rejects
            for row in table.filter(pc.equal(table["reason"], "not_utf8")).to_pylist()
        ]
        num_samples = self.survey.num_samples - before
        self.shards.append(SampledShard(url=url, num_samples=num_samples, error=error, undecoded=tuple(undecoded)))

    def _count(self, rows_of: MemberRows | TableSource, url: str, num_shards: int, rejects: list[pa.Table]) -> None:
        batches = first_samples(
            rows_of,
            layout=self.spec.samples,
            max_samples=max(MAX_SAMPLES // num_shards, 1),
            max_bytes=MAX_BYTES // num_shards,
            max_reads=MAX_READS // num_shards,
            grouped=self.spec.partition_pattern is not None,
            on_damaged_shard=self.spec.on_damaged_shard,
            rejects=rejects,
            pdf=self.pdf,
        )
        num_rows = 0

        def counting() -> Iterator[pa.RecordBatch]:
            nonlocal num_rows
            for batch in batches:
                num_rows += batch.num_rows
                yield batch

        if isinstance(rows_of, MemberRows):
            for kind, value in self.survey.samples(batches, shard=url):
                self._number += 1
                self._of_kind.setdefault(kind, ColumnTally(self.spec.samples)).add(value, self._number)
            return
        for _ in self.survey.samples(counting(), shard=url):
            self._num_listed += 1
        for content in islice(rows_of.objects(layout=self.spec.samples), num_rows):
            self._number += 1
            self._of_tables.add(content, self._number)

    def decide(self, num_shards: int) -> Decision:
        """The layout that the samples give."""
        spec, kinds = self.spec, self.survey.kinds
        tally = ColumnTally(spec.samples)
        for kind in kinds:
            if kind.fits and kind.kind in self._of_kind:
                tally.update(self._of_kind[kind.kind])
        from_tables = 2 * self._num_listed > self.survey.num_samples
        tally.update(self._of_tables)
        annotated = tuple(column for annotator in spec.build_annotators() for column in annotator.columns)
        shown = next((shard.url for shard in self.shards if not shard.error), "no shard")
        columns = tally.columns(shown=shown, taken=[column.name for column in annotated])
        if from_tables:  # whose columns are on any row
            columns = tuple(replace(column, rows="") for column in columns)
        plan = plan_of(self.survey, pack=spec.pack, where=spec.where, columns=(*columns, *annotated))
        schema = DatasetSchema(user_columns=columns, annotator_columns=annotated, pack=plan.to_json(), pdf=self.pdf)
        ordered = sorted(self.survey.rows.items(), key=lambda item: (-item[1].num_samples, item[0]))
        return Decision(
            schema=schema,
            num_shards=num_shards,
            shards=tuple(self.shards),
            kinds=tuple(replace(kind, unplaced=_unplaced(plan, kind)) for kind in kinds),
            row_kinds=tuple(_row_kind(plan, modality, role, count) for (modality, role), count in ordered),
            columns=tuple(_column_evidence(tally, column) for column in columns),
            remarks=tuple(filter(None, (*self.remarks, self.survey.names.note(), _without_media(kinds, plan)))),
        )


def _row_kind(plan: PackPlan, modality: str, role: str, count: RowCount) -> RowKind:
    takers = []
    for made in plan.modalities:
        for part, selector in made.selectors.items():
            example = role[: -len(NUMBERED)] + "0" if is_numbered(role) else role
            if any(selector.rank(modality, example, extension) is not None for extension in count.extensions):
                takers.append(f"{made.name}.{part}" if part else made.name)
    rest = plan.special("rest")
    if not takers and rest is not None:
        takers.append(plan.modalities[rest].name)
    return RowKind(
        modality=modality,
        role=role,
        num_samples=count.num_samples,
        num_rows=count.num_rows,
        extensions=dict(sorted(count.extensions.items())),
        packed_as=tuple(takers),
    )


def _without_media(kinds: Sequence[SampleKind], plan: PackPlan) -> str | None:
    """Says how many of the samples that decided have no media though others do; None if all have, or none.

    In interleaved samples text alone is ordinary.
    """
    fitting = [kind for kind in kinds if kind.fits]
    media = sorted({modality for kind in fitting for modality, *_ in kind.kind} - {"text"})
    num_bare = sum(kind.num_samples for kind in fitting if {modality for modality, *_ in kind.kind} <= {"text"})
    if not num_bare or not media or plan.preset == "interleaved":
        return None
    total = sum(kind.num_samples for kind in fitting)
    return (
        f"{num_bare:,} of {counted(total, 'sampled sample')} have no media, though others have {', '.join(media)}: "
        "they are packed without; to drop them, add the filter `has_modalities`"
    )


def _unplaced(plan: PackPlan, kind: SampleKind) -> tuple[str, ...]:
    rows = [kind.example[number] for number in plan.unplaced(kind.example)]
    return tuple(dict.fromkeys(group_name(modality, shown_role(role)) for modality, role, _ in rows))


def _column_evidence(tally: ColumnTally, column: UserColumn) -> ColumnEvidence:
    num_samples, types = tally.evidence(column)
    return ColumnEvidence(
        name=column.name, source=column.source, type=column.type, num_samples=num_samples, types=types
    )
