"""Which media a reader of the packed file could decode, and which rows can be packed.

`Judge` places the rows of each block as packing will, and decodes every media item once, as the packed file's reader
does: by its field's `check_decodable`. Bytes that no field decodes, such as those of the rest, are judged
by the fields that read their type. What is refused is *undecodable*, and a policy decides what becomes of it. Verdicts
and their order do not depend on the threads that decode. Where the host runs out of memory or files, the
partition fails.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, NamedTuple

import pyarrow as pa

from mm_assets.errors import EncodeError, FormatError, LimitError, MediaError, MissingExtraError, SourceError
from mm_assets.fields import AudioField, DepthField, Encoded, Field, ImageField, SyncedVideoAudioField
from mm_assets.fields.base import PAYLOAD
from mm_assets.media.content_types import Buffer
from mm_assets.media.images import probe_image
from mm_assets.media.picture import has_high_range
from mm_assets.media.video import VIDEO_TYPES
from mm_assets.packing.kinds import AUDIO_TYPES, DEPTH_TYPES, IMAGE_TYPES, group_name, shown_role
from mm_assets.packing.pack import placed_contents
from mm_assets.packing.placement import BlockRows, Placement, Placer
from mm_assets.packing.plan import PackPlan, row_name
from mm_assets.rows.schema import UNDECODABLE_SCHEMA, Drop
from mm_assets.rows.source_ref import parse_source_ref

__all__ = ["Judge", "Mode", "Policy", "packable"]

Policy = Literal["drop_row", "drop_sample", "keep", "fail"]
Mode = Literal["full", "headers"]

UNDECODABLE, REFUSED, OMITTED = "undecodable", "refused", "omitted"  # reasons in the table `undecodable`
MAX_SAMPLE_BYTES = (1 << 32) - (1 << 24)  # MULT counts a sample in uint32; the rest is for headers and records
THREADS = 2
MAX_WAITING = 32  # items that are decoded, or wait for those before them
MAX_WAITING_BYTES = 32 << 20  # of their payloads; a single one may be larger

_NO_ROWS: frozenset[int] = frozenset()
_HEIF_TYPES = frozenset(("image/avif", "image/heic", "image/heif"))
_READERS: tuple[tuple[frozenset[str], Field], ...] = (
    (IMAGE_TYPES, ImageField()),
    (DEPTH_TYPES, DepthField()),  # images without an 8-bit form
    (AUDIO_TYPES, AudioField()),
    (VIDEO_TYPES, SyncedVideoAudioField()),
)


class _Task(NamedTuple):
    """A payload to decode.

    Attributes:
        taker: number of the packed modality that has it.
        rows: the media rows that it was made of, several for a composite.
        size: bytes that the task holds.
        judge: returns what is wrong with it, or None.
    """

    taker: int
    rows: tuple[int, ...]
    size: int
    judge: Callable[[], str | None]


class _Fault(NamedTuple):
    """Why a row is undecodable: the packed modality that refused it, and the words of its field."""

    modality: str
    detail: str


_Faults = Mapping[int, _Fault]  # by row


class _Left(NamedTuple):
    """A sample for `packable`: refused rows with reason and detail, the rows that name it, its bytes if it is large."""

    refused: list[tuple[int, str, str | None]]
    heads: list[int]
    size: int


class _Block:
    """A block while its media are judged: what is known of its rows so far."""

    def __init__(self, rows: BlockRows) -> None:
        self.rows = rows
        self.faults: dict[int, _Fault] = {}
        self.passed: set[tuple[int, int]] = set()  # packed modality and row of what decodes
        self.placements: dict[int, Placement] = {}  # by the sample's first row

    def is_media(self, row: int) -> bool:
        """Whether the row is an image, audio or video, by its kind or by the type of its bytes."""
        named = (self.rows.modality[row], (self.rows.content_type[row] or "").partition("/")[0])
        return any(name in ("image", "audio", "video") for name in named) and not self.is_text(row)

    def is_text(self, row: int) -> bool:
        """Whether the row's content is text."""
        return self.rows.modality[row] in ("text", "metadata")


class Judge:
    """Finds the undecodable media of blocks, then the rows that cannot be packed; for one partition, block by block.

    The two steps share one placement of the rows: `undecodable` is called first, then `packable` with what it left.

    Args:
        plan: the pack plan.
        policy: what becomes of undecodable media: "drop_row", "drop_sample", "keep" or "fail".
        mode: "full" decodes all media; "headers" only lists what its field refuses by its header.

    Attributes:
        num_judged: media items that were decoded.
        num_undecodable: items that are undecodable.
        num_unplaced: samples with content that no packed modality takes, or that lacks the other parts of a composite.
        unplaced: kinds of that content, with the number of rows.
        num_high_range: images and clips with a high dynamic range, which decode to pale pixels; only with "full".
        first_high_range: the first of them, in words; None where there is none.
        unnamed_media: media that are packed as bytes because their names give no modality: extension and modality, with
            the number of rows; only with "full".
    """

    def __init__(self, plan: PackPlan, *, policy: Policy, mode: Mode) -> None:
        self._policy = policy
        self._full = mode == "full"
        # Decoding needs payloads. They are encoded while rows are placed, which checks them too.
        self._placer = Placer(plan, encode=self._full)
        self._is_opaque = [(made.item_field or made).TAKES_ANY_BYTES for made in self._placer.fields]
        self._is_composite = [modality.selector.take == "parts" for modality in plan.modalities]
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="judge")
        self._found: list[pa.RecordBatch] = []
        self._faulty: list[pa.RecordBatch] = []
        self._left: list[_Left] = []
        self._numbers: Mapping[int, int] | range = {}  # of the rows that are left: before and after the others went
        self.num_judged = 0
        self.num_undecodable = 0
        self.num_unplaced = 0
        self.unplaced: Counter[str] = Counter()
        self.unnamed_media: Counter[tuple[str, str]] = Counter()
        self.num_high_range = 0
        self.first_high_range: str | None = None

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def take_undecodable(self) -> list[pa.RecordBatch]:
        """The undecodable items found since the last call, with `UNDECODABLE_SCHEMA`."""
        taken, self._found = self._found, []
        return taken

    def take_faulty(self) -> list[pa.RecordBatch]:
        """The contents since the last call that their field refused or took in part, with `UNDECODABLE_SCHEMA`."""
        taken, self._faulty = self._faulty, []
        return taken

    # --- the two steps ------------------------------------------------------------------------------------------------

    def undecodable(self, table: pa.Table, contents: Sequence[memoryview | None] | None = None) -> Iterable[Drop]:
        """Drops rows or samples for their media, as the policy says; reason ``undecodable``.

        Args:
            table: whole samples.
            contents: the rows' `content_views`, where these are known.

        Raises:
            SourceError: an item is undecodable, and the policy is "fail"; or the host failed while it was judged.
            MissingExtraError: the package that decodes an item is not installed.
        """
        block = _Block(BlockRows(table, contents))
        self._judge(block)
        gone: dict[int, Drop] = {}
        for row, fault in sorted(block.faults.items()):
            if self._policy == "fail":
                raise _failure(block.rows, row, fault)
            if self._policy == "drop_row":
                gone[row] = Drop(row, UNDECODABLE, None, fault.detail)
            elif self._policy == "drop_sample":
                placement = next(p for p in block.placements.values() if p.start <= row < p.stop)
                gone[row] = Drop(row, UNDECODABLE, None, fault.detail)
                detail = f"dropped with its sample: {block.rows.member[row]}: {fault.detail}"
                for other in range(placement.start, placement.stop):
                    gone.setdefault(other, Drop(other, UNDECODABLE, None, detail))
        self._note(table, block)
        every = range(block.rows.num_rows)
        self._numbers = {row: n for n, row in enumerate(r for r in every if r not in gone)} if gone else every
        may_be_large = table.nbytes > MAX_SAMPLE_BYTES
        self._left = [
            self._left_of(block.rows, placement, may_be_large)
            for placement in block.placements.values()
            if placement.refused or may_be_large
        ]
        return list(gone.values())

    def packable(self, table: pa.Table) -> Iterable[Drop]:
        """Drops the rows that cannot be packed, of those that `undecodable` has left of its table.

        Reasons: ``not_materialized`` (the row has an error instead of content), ``no_content``, ``unpackable_<row
        modality>`` (its field refuses the content), ``unpackable_<packed modality>`` (a composite refuses its parts),
        ``incomplete_<packed modality>`` (a part that it needs is missing), ``not_selected`` (no packed modality takes
        it), and for whole samples, named by their metadata row, ``unpackable_metadata``, ``unpackable_<packed
        modality>`` (a value out of the JSON is refused) and ``sample_too_large`` (value: its bytes).
        """
        if table.num_rows != len(self._numbers):
            raise ValueError(f"found {table.num_rows} rows, expected the {len(self._numbers)} that were judged")
        for left in self._left:
            for row, reason, detail in left.refused:
                yield Drop(self._numbers[row], reason, None, detail)
            if left.size > MAX_SAMPLE_BYTES:
                for row in left.heads:
                    yield Drop(self._numbers[row], "sample_too_large", float(left.size))

    def _left_of(self, rows: BlockRows, placement: Placement, may_be_large: bool) -> _Left:
        refused = [
            (row, reason, placement.unfit[row].detail if row in placement.unfit else None)
            for row, reason in sorted(placement.refused.items())
            if row in self._numbers
        ]
        unplaced = [row for row, reason, _ in refused if reason.startswith(("not_selected", "incomplete_"))]
        self.num_unplaced += bool(unplaced)
        for row in unplaced:
            modality, role, _ = row_name(rows.modality[row], rows.member[row], self._placer.plan.roles)
            self.unplaced[group_name(modality, shown_role(role))] += 1
        left = [row for row in range(placement.start, placement.stop) if row in self._numbers]
        # A metadata row names its sample; a sample without one has only rows to name.
        heads = [row for row in left if rows.is_metadata(row)] or left
        size = sum(len(content) for _, content in placed_contents(rows, placement)) if may_be_large else 0
        return _Left(refused, heads, size)

    def _note(self, table: pa.Table, block: _Block) -> None:
        """Adds the faults of a block to the table of them, and the contents that are packed in spite of a fault."""
        self.num_undecodable += len(block.faults)
        faults = [(row, UNDECODABLE, fault, self._policy) for row, fault in sorted(block.faults.items())]
        kept = [(row, reason, fault, "keep") for row, reason, fault in self._kept(block)]
        for noted, batches in ((faults, self._found), (kept, self._faulty)):
            if noted:
                batches.append(_batch_of(table, block.rows, noted))

    def _kept(self, block: _Block) -> Iterator[tuple[int, str, _Fault]]:
        """The rows that a field refused or took in part, with the reason; of a value in the JSON the metadata row."""
        placer = self._placer
        for placement in block.placements.values():
            for item in placement.items.get(placer.rest, ()) if placer.rest is not None else ():
                if item.row in placement.unfit and item.row not in block.faults:
                    yield item.row, REFUSED, _Fault(*placement.unfit[item.row][:2])
            head = next(filter(block.rows.is_metadata, range(placement.start, placement.stop)), placement.start)
            for taker, detail in placement.without.items():
                yield head, REFUSED, _Fault(placer.names[taker], detail)
            for row, taker, omissions in placer.omissions(block.rows, placement):
                more = f"; and {len(omissions) - 1:,} more" if len(omissions) > 1 else ""
                yield head if row is None else row, OMITTED, _Fault(placer.names[taker], f"{omissions[0]}{more}")

    # --- judging ------------------------------------------------------------------------------------------------------

    def _judge(self, block: _Block) -> None:
        """Judges all media of a block, and places its rows without those that the policy drops."""
        left_out = dict.fromkeys(block.rows.samples(), _NO_ROWS)
        todo = list(left_out)
        while todo:
            for faults in self._verdicts(block, {sample: left_out[sample] for sample in todo}):
                block.faults.update(faults)
            todo = []
            for (start, stop), before in left_out.items() if self._policy == "drop_row" and block.faults else ():
                faulty = frozenset(row for row in block.faults if start <= row < stop)
                if faulty != before:  # another row may take the place of one that goes
                    left_out[start, stop] = faulty
                    todo.append((start, stop))

    def _verdicts(self, block: _Block, samples: Mapping[tuple[int, int], frozenset[int]]) -> Iterator[_Faults]:
        """The faults of samples, placed without the rows that are left out of each; what was judged is not again."""

        def tasks() -> Iterator[_Task | _Faults]:
            for (start, stop), left_out in samples.items():
                with _HostFailureNamed(block.rows, start):
                    placement = self._placer.settled(block.rows, start, stop, left_out)
                    block.placements[start] = placement
                    # A sample whose metadata row is refused goes anyway.
                    if not (placement.refused and any(map(block.rows.is_metadata, placement.refused))):
                        yield from self._tasks(block, placement)
                placement.encoded.clear()
                placement.encoded_rows.clear()

        for task, verdict in self._run(tasks()):
            if not isinstance(task, _Task):
                yield task
                continue
            self.num_judged += len(task.rows)
            with _HostFailureNamed(block.rows, task.rows[0]):
                detail = verdict()
                found = None if detail is None else self._culprits(block, task, detail)
                if found is None:
                    self._find_high_range(block.rows, task.rows)
            if found is None:
                block.passed.update((task.taker, row) for row in task.rows)
            else:
                yield found

    def _find_high_range(self, rows: BlockRows, passed: Iterable[int]) -> None:
        """Counts the images and clips among rows that would have to be mapped to the range of a screen."""
        for row in passed:
            content, kind = rows.content(row), rows.content_type[row]
            if content is None or (kind not in VIDEO_TYPES and kind not in _HEIF_TYPES):
                continue
            try:
                is_high = has_high_range(content) if kind in VIDEO_TYPES else probe_image(content).has_high_range
            except (MediaError, MissingExtraError):  # a field of the user's own may take what PyAV does not read
                continue
            if is_high:
                self.num_high_range += 1
                self.first_high_range = self.first_high_range or f"sample {rows.sample_id[row]!r}, {rows.member[row]}"

    def _run(self, tasks: Iterable[_Task | _Faults]) -> Iterator[tuple[_Task | _Faults, Callable[[], str | None]]]:
        """Each task with its verdict, in order, from threads; faults pass through in their place."""
        waiting: deque[tuple[_Task | _Faults, Callable[[], str | None]]] = deque()
        held = 0
        for task in tasks:
            if isinstance(task, _Task):
                waiting.append((task, self._pool.submit(task.judge).result))
                held += task.size
            else:
                waiting.append((task, _nothing))
            while len(waiting) >= MAX_WAITING or (held > MAX_WAITING_BYTES and waiting):
                first, verdict = waiting.popleft()
                held -= first.size if isinstance(first, _Task) else 0
                yield first, verdict
        yield from waiting

    def _tasks(self, block: _Block, placement: Placement) -> Iterator[_Task | _Faults]:
        """The media of a sample that are to be decoded, and the faults that need no decoding."""
        refused: set[int] = set()
        placer = self._placer
        if not (self._full or placement.unfit):
            return
        rest = () if placer.rest is None else placement.items.get(placer.rest, ())
        homeless = {item.row for item in rest} | placement.refused.keys()
        for row in sorted(homeless & placement.unfit.keys()):
            unfit = placement.unfit[row]
            if row not in block.faults and block.is_media(row) and not unfit.is_limit:
                for found in self._refused(block, row, unfit.modality, unfit.detail):
                    refused.add(row)
                    yield found
        for taker, items in sorted(placement.items.items()) if self._full else ():
            rows = [item.row for item in items if not block.is_text(item.row) and item.row not in refused]
            rows = [row for row in rows if row not in block.faults and (taker, row) not in block.passed]
            if not rows:
                continue
            if self._is_opaque[taker]:
                yield from self._opaque(block, taker, rows)
            elif self._is_composite[taker]:
                yield _task(taker, rows, placer.fields[taker], placement.encoded[taker])
            else:
                made = placer.fields[taker].item_field or placer.fields[taker]
                for row in rows:
                    yield _task(taker, [row], made, placement.encoded_rows[row])

    def _refused(self, block: _Block, row: int, modality: str, detail: str) -> Iterator[_Task | _Faults]:
        """The fault of media that a field refused, if they are at fault and not a composite's other parts."""
        taker = self._placer.names.index(modality)
        if not self._is_composite[taker]:
            yield {row: _Fault(modality, detail)}
            return
        try:
            alone = self._placer.alone(taker, block.rows, row)
        except EncodeError as error:
            if not isinstance(error, LimitError):
                yield {row: _Fault(modality, str(error))}
            return
        if alone is not None and self._full and (taker, row) not in block.passed:
            yield _task(taker, [row], self._placer.fields[taker], alone)

    def _opaque(self, block: _Block, taker: int, rows: Iterable[int]) -> Iterator[_Task]:
        """Bytes that no field decodes, where their type is one that a field reads."""
        for row in rows:
            content, kind = block.rows.content(row), block.rows.content_type[row]
            readers = [made for types, made in _READERS if kind in types]
            if content is not None and readers:
                if block.rows.modality[row] == "binary":
                    extension = row_name("", block.rows.member[row], None)[2]
                    self.unnamed_media[extension, (kind or "").partition("/")[0]] += 1
                yield _Task(taker, (row,), len(content), partial(_unread, content, readers))

    def _culprits(self, block: _Block, task: _Task, detail: str) -> _Faults:
        """Which rows of a payload that does not decode are at fault: those that do not alone, else all."""
        modality, made = self._placer.names[task.taker], self._placer.fields[task.taker]
        faults: dict[int, _Fault] = {}
        passed = []
        for row in task.rows if len(task.rows) > 1 else ():
            try:
                alone = self._placer.alone(task.taker, block.rows, row)
                wrong = None if alone is None else _undecoded(made, alone)
            except EncodeError as error:
                wrong = None if isinstance(error, LimitError) else str(error)
            if wrong is None:
                passed.append((task.taker, row))
            else:
                faults[row] = _Fault(modality, wrong)
        if not faults:
            return {row: _Fault(modality, detail) for row in task.rows}
        block.passed.update(passed)
        return faults


def packable(plan: PackPlan) -> Callable[..., Iterable[Drop]]:
    """Makes the filter step that finds rows which cannot be packed by a plan, without decoding any.

    It takes a table of whole samples, and their `content_views` where these are known, and yields a `Drop` per refused
    row; `Judge.packable` has the reasons.
    """

    def judge(table: pa.Table, contents: Sequence[memoryview | None] | None = None) -> Iterable[Drop]:
        with Judge(plan, policy="keep", mode="headers") as judge:
            judge.undecodable(table, contents)
            yield from judge.packable(table)

    return judge


def _batch_of(table: pa.Table, rows: BlockRows, noted: Sequence[tuple[int, str, _Fault, str]]) -> pa.RecordBatch:
    """Rows of a block as rows of the table `undecodable`, each with reason, fault and action."""
    refs = table.column("source_ref").take([row for row, *_ in noted]).to_pylist()
    found = [
        (
            *(column[row] for column in (rows.sample_id, rows.position, rows.modality, rows.member)),
            ref,
            rows.content_type[row],
            fault.modality,
            reason,
            fault.detail,
            action,
        )
        for (row, reason, fault, action), ref in zip(noted, refs, strict=True)
    ]
    columns = zip(*found, strict=True)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, UNDECODABLE_SCHEMA.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=UNDECODABLE_SCHEMA)


def _task(taker: int, rows: Iterable[int], made: Field, payload: Encoded) -> _Task:
    return _Task(taker, tuple(rows), len(payload.data), partial(_undecoded, made, payload))


def _undecoded(made: Field, payload: Encoded) -> str | None:
    """What a field finds wrong with a payload, or None; that it is too large for a setting of its reader is not."""
    try:
        made.check_decodable(*payload)
    except LimitError:
        return None
    except FormatError as error:
        return str(error).removeprefix(f"{PAYLOAD}: ")
    return None


def _unread(content: Buffer, readers: Iterable[Field]) -> str | None:
    """What the first of several fields finds wrong with bytes that none of them reads; None where one does."""
    wrong: list[str | None] = []
    for made in readers:
        try:
            wrong.append(_undecoded(made, made.encode(content)))
        except LimitError:
            return None
        except EncodeError as error:
            wrong.append(str(error))
        if wrong[-1] is None:
            return None
    return wrong[0]


def _nothing() -> None:
    """The verdict on what was judged already."""


class _HostFailureNamed:
    """Turns the host's want of memory or files into a `SourceError` that names a sample: its media may be healthy.

    Not a generator's context manager, which takes three times as long: it is entered for every sample.
    """

    __slots__ = ("_row", "_rows")

    def __init__(self, rows: BlockRows, row: int) -> None:
        self._rows = rows
        self._row = row

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, MemoryError | OSError):
            found = f"cannot be judged on this host ({type(error).__name__}{f': {error}' if str(error) else ''})"
            advice = "nothing was dropped: free memory, or run fewer partitions at a time, then run this again"
            raise _error_of(self._rows, self._row, f"{found}; {advice}") from error


def _failure(rows: BlockRows, row: int, fault: _Fault) -> SourceError:
    advice = "replace it, or set on_undecodable to drop_row, drop_sample or keep"
    return _error_of(rows, row, f"cannot be decoded: {fault.detail}; {advice}")


def _error_of(rows: BlockRows, row: int, detail: str) -> SourceError:
    ref = rows.value("source_ref", row)
    path = parse_source_ref(ref).path if ref is not None else None
    where = f"sample {rows.sample_id[row]!r}"
    if rows.is_metadata(row):  # it names its sample
        return SourceError(path or "rows", f"{where}: {detail}")
    where += f", {rows.modality[row]} at position {rows.position[row]}"
    return SourceError(path or "rows", f"{where}: {detail}", member=rows.member[row])
