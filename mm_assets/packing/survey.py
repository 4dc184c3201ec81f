"""The kinds of row of each sample, and the contents of its JSON.

Counted at registration, over a sample of the shards. Content has not been read by then, so names and JSON decide.
`Survey.preset` chooses a preset that loses none of these rows, but for those of odd samples; `generic` and `robotics`
make their packed modalities from the kinds of row that were found.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from mm_assets.fields import (
    DepthField,
    Field,
    ScalarField,
    SyncedVideoAudioField,
    TextField,
    TimeSeriesField,
)
from mm_assets.formats import name_hash
from mm_assets.formats.records import MAX_MODALITIES
from mm_assets.media.page_layouts import detect_layout
from mm_assets.media.video import VIDEO_TYPES
from mm_assets.packing.kinds import DEPTH_TYPES, SUBTITLES, Counts, Group, Kind, RowCount, SampleKind, shown_role
from mm_assets.packing.plan import NUMBERED, PackedModality, Selector, Take, row_name
from mm_assets.rows.source_ref import with_parsed_source_ref_columns
from mm_assets.rows.user_columns import is_rare
from mm_assets.sources.member import is_numbered
from mm_assets.sources.name_tally import NameTally
from mm_assets.sources.text_members import BadTextError, parse_object

__all__ = ["MAX_GROUPS", "Survey"]

MAX_GROUPS = MAX_MODALITIES - 3  # of `generic`, in addition to `rest`, `rows` and `metadata`
MAX_NAME = 64  # characters of a name that is made from a role
MIN_SHARDS = 10  # what most samples of one in so many shards consist of is not odd
MAX_SHOWN = 5  # members that a message names of one kind of sample
MAX_EXAMPLE = 64  # content rows of a sample by which a plan is tried
MIN_SHARE = 20  # a kind of row of fewer than one in so many samples becomes no modality, unless it fills shards

CLOCKS = frozenset({"timestamp", "timestamps", "time", "times"})  # roles of the array that dates the others' rows
TIMED_KEYS = ("words", "word_timestamps", "word_timings", "alignment", "segments")  # of a JSON, in order of preference
ROBOT_ROLES = frozenset(
    {"state", "action", "pose", "joints", "qpos", "qvel", "proprio", "proprioception", "timestamp", "depth"}
)
PDF = "pdf"  # the extension
TASK_KEYS = ("task", "language_instruction", "instruction")


class _Row(NamedTuple):
    """The surveyed facts of a row."""

    sample_id: str
    modality: str
    content_type: str | None
    json: str | None
    path: str | None
    member: str | None
    frame: int | None


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[_Row]:
    for batch in batches:
        names = ["sample_id", "modality", "content_type", "metadata_json", "source_ref"]
        table = with_parsed_source_ref_columns(pa.Table.from_batches([batch]).select(names))
        columns = [*names[:4], "_src_path", "_src_member", "_src_frame_index"]
        yield from map(_Row, *(table.column(name).to_pylist() for name in columns))


class Survey:
    """The kinds of row in each sample.

    Kinds of sample that are together less than 20 % of all, of which no tenth of the shards mostly consists, and that
    the others' preset does not fit, decide nothing.

    Args:
        claimed: packed modalities that are declared: the rows that they take decide nothing either.
        roles: the setting `samples.roles`; also an attribute.

    Attributes:
        rows: every content row that was read, by row modality and role.
        names: the names of the members.
    """

    def __init__(self, claimed: tuple[PackedModality, ...] = (), roles: tuple[str, ...] | None = None) -> None:
        self.roles = roles
        self.names = NameTally(roles)
        self._claimed = claimed
        self._claiming = [
            selector
            for modality in claimed
            for selector in modality.selectors.values()
            if selector.take != "shared"  # which leaves the row to others
        ]
        self.rows: dict[tuple[str, str], RowCount] = {}
        self._kinds: dict[Kind, Counts] = {}
        self._shards: dict[str, Counter[Kind]] = {}
        self._settled: tuple[Counts, set[Kind], set[Kind]] | None = None

    def read(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Counts the rows of all batches."""
        for _ in self.samples(batches):
            pass

    def samples(self, batches: Iterable[pa.RecordBatch], *, shard: str = "") -> Iterator[tuple[Kind, dict[str, Any]]]:
        """As `read`, sample by sample: its kind and its JSON, empty where it has none."""
        self._settled = None
        for _, sample in itertools.groupby(_rows(batches), key=operator.attrgetter("sample_id")):
            kind, content = self._count(sample)
            self._shards.setdefault(shard, Counter())[kind] += 1
            yield kind, content

    def _count(self, sample: Iterable[_Row]) -> tuple[Kind, dict[str, Any]]:
        """Counts the rows of one sample, its metadata row first."""
        one = Counts(num_samples=1)
        json_member: str | None = None
        content: dict[str, Any] = {}
        texts: Counter[bool] = Counter()  # plain (False) and timed (True)
        extensions: dict[tuple[str, str], Counter[str]] = {}
        names: list[str] = []
        num_pages = 0
        for row in sample:
            names += [] if row.member is None else [row.member]
            if row.member is not None and len(one.members) < MAX_SHOWN and (row.member, row.path) not in one.members:
                one.members.append((row.member, row.path))
            if row.modality == "metadata":
                json_member = row.member
                content = _survey_json(one, row.json)
                continue
            _, role, extension = named = row_name(row.modality, row.member, self.roles)
            is_page = extension == PDF and row.modality == "image" and row.frame is not None
            num_pages += is_page
            # Text out of the sample's JSON, frames of one file, and texts of pages: rows whose order matters.
            one.interleaved |= (row.frame is not None and not is_page) or (
                row.modality == "text" and row.member is not None and row.member == json_member
            )
            if len(one.example) < MAX_EXAMPLE:
                one.example.append(named)
            key = (row.modality, shown_role(role))
            extensions.setdefault(key, Counter())[extension] += 1
            if any(selector.rank(row.modality, role, extension) is not None for selector in self._claiming):
                continue
            group = one.groups.setdefault(key, Group(*key))
            group.num_rows += 1
            group.types[(row.content_type or "").partition(";")[0]] += 1
            if row.modality == "text":
                texts[extension in SUBTITLES] += 1
        self.names.add(names)
        for key, found in extensions.items():
            count = self.rows.setdefault(key, RowCount())
            count.num_samples += 1
            count.num_rows += found.total()
            count.extensions += found
        one.num_paged = int(num_pages > 0)
        one.num_layouts += one.num_paged
        others = [extensions[key].keys() for key in one.groups if key[0] != "text"]
        one.num_pdfs = int(bool(others) and num_pages == 0 and all(kinds == {PDF} for kinds in others))
        for group in one.groups.values():
            group.num_samples, group.most = 1, group.num_rows
            one.most[group.modality] += group.num_rows
        one.samples_of.update(one.most.keys())
        one.samples_of["robot"] += any(_is_robot(group) for group in one.groups.values())
        one.least = {modality: one.most[modality] for modality in ("text", "image", "audio")}
        one.most = +one.most  # without the zeros that asking left
        one.most_plain, one.most_timed = texts[False], texts[True]
        kind = tuple(sorted((group.modality, group.role, group.many) for group in one.groups.values()))
        known = self._kinds.get(kind)
        if known is None:
            self._kinds[kind] = one
        else:
            known.update(one)
        return kind, content

    def _settle(self) -> tuple[Counts, set[Kind], set[Kind]]:
        """The counts that decide, the kinds of sample that do not, and those that whole shards mostly consist of."""
        if self._settled is None:
            # What whole shards consist of is not odd: they would be lost.
            mains = Counter(max(kinds, key=lambda kind: (kinds[kind], kind)) for kinds in self._shards.values())
            usual = {kind for kind, shards in mains.items() if MIN_SHARDS * shards >= len(self._shards)}
            rare: list[Kind] = []
            num_rare = 0
            for kind in sorted(self._kinds.keys() - usual, key=lambda kind: (self._kinds[kind].num_samples, kind)):
                num_rare += self._kinds[kind].num_samples
                if not is_rare(num_rare, self.num_samples):
                    break
                rare.append(kind)
            main = Counts()
            for kind, counts in self._kinds.items():
                if kind not in rare:
                    main.update(counts)
            odd = set()
            for kind in reversed(rare):
                if main.takes(self._kinds[kind]):
                    main.update(self._kinds[kind])
                else:
                    odd.add(kind)
            self._settled = main, odd, usual
        return self._settled

    @property
    def num_samples(self) -> int:
        """Samples that were read."""
        return sum(counts.num_samples for counts in self._kinds.values())

    @property
    def is_of_pdfs(self) -> bool:
        """Whether most samples consist of a PDF, and of texts, and the PDF's pages are not rows."""
        return 2 * sum(counts.num_pdfs for counts in self._kinds.values()) > self.num_samples

    @property
    def has_pages(self) -> bool:
        """Whether pages of PDFs are rows of samples that decide."""
        return self._settle()[0].num_paged > 0

    @property
    def kinds(self) -> list[SampleKind]:
        """The kinds of sample, the most frequent first."""
        odd = self._settle()[1]
        ordered = sorted(self._kinds.items(), key=lambda item: (-item[1].num_samples, item[0]))
        return [
            SampleKind(
                kind=kind,
                num_samples=found.num_samples,
                fits=kind not in odd,
                members=tuple(found.members),
                example=tuple(found.example),
            )
            for kind, found in ordered
        ]

    def json_key(self, keys: Iterable[str], kind: str) -> str | None:
        """The first of some keys whose values in the samples' JSON are all of one kind."""
        return next((key for key in keys if self._settle()[0].json_kinds.get(key) == {kind}), None)

    def preset(self) -> str:
        """The preset that fits: each content row of every sample has a place in it, but for the odd ones."""
        return self._settle()[0].preset()

    def generic(self, reserved: int = 0) -> list[PackedModality]:
        """A packed modality for each of the most frequent groups, in a fixed order; `reserved` fewer than could be."""
        return self._discovered(lambda group, _: (group.made_field(), None), MAX_GROUPS - reserved)

    def robotics(self, reserved: int = 0) -> list[PackedModality]:
        """As `generic`, with clips, depth, series on the sample's clock where it has one, and the task."""
        clocks = self._clocks()

        def choose(group: Group, selector: Selector) -> tuple[Field, dict[str, Selector] | None]:
            if group.many:
                return group.made_field(), None
            last = group.role.rsplit(".", 1)[-1].lower()
            clock = _clock_of(group.role, clocks)
            if group.modality == "video" and group.mostly(VIDEO_TYPES):
                return SyncedVideoAudioField(), None
            if group.modality == "image" and "depth" in group.role.lower() and group.mostly(DEPTH_TYPES):
                return DepthField(), None
            dated = clock is not None and 2 * clock.num_samples >= group.num_samples
            if group.modality == "array" and clock is not None and dated and last not in CLOCKS:
                dates = Selector(modality="array", role=_pattern(clock.role), take="shared")
                return TimeSeriesField(), {"timestamps": dates, "values": selector}
            return group.made_field(), None

        found = self._discovered(choose, MAX_GROUPS - 2 - reserved)  # two more come out of the JSON
        taken = {modality.name for modality in (*found, *self._claimed)}
        task = self.json_key(TASK_KEYS, "text")
        if task is not None and "task" not in taken:
            found.append(PackedModality.of("task", TextField(), _at(task)))
        if self.json_key(("timestamp",), "number") is not None and "timestamp" not in taken:
            found.append(PackedModality.of("timestamp", ScalarField("float64"), _at("timestamp")))
        return found

    def _clocks(self) -> list[Group]:
        """The arrays that date the rows of other arrays, the most frequent first."""
        arrays = [group for group in self._settle()[0].groups.values() if group.modality == "array" and not group.many]
        clocks = [group for group in arrays if group.role.rsplit(".", 1)[-1].lower() in CLOCKS]
        return sorted(clocks, key=lambda group: (-group.num_samples, group.role))

    def _discovered(
        self, choose: Callable[[Group, Selector], tuple[Field, dict[str, Selector] | None]], limit: int
    ) -> list[PackedModality]:
        limit -= len(self._claimed)
        # A kind of row that hardly any sample has is in the rest: one odd member changes nothing.
        counts, _, of_shards = self._settle()
        needed = {(modality, role) for kind in of_shards for modality, role, _ in kind}
        least = counts.num_samples // MIN_SHARE
        usual = [group for key, group in counts.groups.items() if group.num_samples >= least or key in needed]
        frequent = sorted(usual, key=lambda g: (-g.num_rows, g.modality, g.role))[: max(limit, 0)]
        reserved = {name_hash(name): name for name in ("rest", "rows", "metadata", *(m.name for m in self._claimed))}
        modalities = []
        for group in sorted(frequent, key=lambda g: (g.modality, g.role)):
            name = _free_name(group, reserved)
            take: Take = "sequence" if group.many else "one"
            selector = Selector(modality=group.modality, role=_pattern(group.role), take=take)
            made, parts = choose(group, selector)
            modalities.append(PackedModality.of(name, made, None if parts else selector, parts=parts))
        return modalities


def _survey_json(counts: Counts, text: str | None) -> dict[str, Any]:
    """Counts what the JSON of a sample holds; returns it, empty where it is not an object."""
    if text is None:
        return {}
    try:
        content = parse_object(text).value
    except BadTextError:  # reported when the sample is packed
        return {}
    counts.num_json += 1
    counts.num_layouts += detect_layout(content) is not None
    for key in (*TIMED_KEYS, *TASK_KEYS, "timestamp"):
        if content.get(key) is not None:
            counts.json_kinds.setdefault(key, set()).add(_kind_of(content[key]))
    return content


def _is_robot(group: Group) -> bool:
    """Whether a group is a robot's recording: arrays of states and actions, or depth images."""
    words = set(re.split(r"[._-]", group.role.lower()))
    return bool(words & ROBOT_ROLES) and group.modality == ("image" if words & {"depth"} else "array")


_TIMES = ({"start", "start_seconds", "start_time"}, {"end", "end_seconds", "end_time"}, {"word", "text"})


def _kind_of(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, list) and any(map(_is_timed, value)) and all(map(_is_word, value)):
        return "timed"
    return "other"


def _is_timed(item: Any) -> bool:
    """Whether a JSON value is a time span with a text, in one of the forms that `TimedTextField` takes."""
    if isinstance(item, dict):
        return all(names & item.keys() for names in _TIMES)
    return False


def _is_word(item: Any) -> bool:
    """Whether a JSON value has a text, timed or not: aligners omit the times of words that they do not find."""
    return isinstance(item, dict) and bool({"word", "text"} & item.keys())


def _at(key: str) -> Selector:
    """A value of the JSON that was found, not declared: a later sample with another kind of value lacks it."""
    return Selector(take="json", key=(key,), on_refused="absent")


def _pattern(role: str) -> str:
    """A pattern that matches this role alone."""
    return re.sub(r"([*?\[])", r"[\1]", role)


def _clock_of(role: str, clocks: Sequence[Group]) -> Group | None:
    """The clock of an array: of those whose name begins as its own the nearest, else the first."""
    shared = [clock for clock in clocks if f"{role}.".startswith(clock.role.rpartition(".")[0] + ".")]
    return max(shared, key=lambda clock: len(clock.role), default=clocks[0] if clocks else None)


def _unnumbered(role: str) -> str:
    """A role without the part that numbers its rows."""
    return role[: -len(NUMBERED)].removesuffix(".") if is_numbered(role) else role


def _free_name(group: Group, taken: dict[int, str]) -> str:
    """A name from the group's role, that no other modality has."""
    role = re.sub(r"[\x00-\x1f\x7f\s]+", "_", _unnumbered(group.role))[:MAX_NAME]
    plain = role or group.modality
    longer = f"{group.modality}_{role}" if role else group.modality
    wishes = itertools.chain([plain, longer], (f"{longer}_{number}" for number in itertools.count(2)))
    name = next(wish for wish in wishes if name_hash(wish) not in taken)
    taken[name_hash(name)] = name
    return name
