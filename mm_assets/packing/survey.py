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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from mm_assets.fields import (
    AudioField,
    BytesField,
    DepthField,
    Field,
    ImageField,
    NDArrayField,
    ScalarField,
    SequenceField,
    SyncedVideoAudioField,
    TextField,
    TimeSeriesField,
)
from mm_assets.formats import name_hash
from mm_assets.formats.records import MAX_MODALITIES
from mm_assets.media.page_layouts import detect_layout
from mm_assets.media.video import VIDEO_TYPES
from mm_assets.packing.plan import NUMBERED, PackedModality, RowName, Selector, Take
from mm_assets.rows.source_ref import with_parsed_source_ref_columns
from mm_assets.rows.user_columns import is_rare
from mm_assets.sources.member import split_member_name
from mm_assets.sources.text_members import BadTextError, parse_object

__all__ = ["MAX_GROUPS", "REASONS", "Kind", "RowCount", "SampleKind", "Survey", "group_name", "shown_role"]

MAX_GROUPS = MAX_MODALITIES - 3  # of `generic`, in addition to `rest`, `rows` and `metadata`
MAX_NAME = 64  # characters of a name that is made from a role
MIN_SHARDS = 10  # what most samples of one in so many shards consist of is not odd
MAX_SHOWN = 5  # members that a message names of one kind of sample
MAX_EXAMPLE = 64  # content rows of a sample by which a plan is tried
MIN_SHARE = (
    20  # a kind of row that fewer than one in so many samples have becomes no modality, unless shards consist of it
)

# Names by the extension alone: at registration nothing has been materialized yet.
IMAGE_TYPES = frozenset(
    {
        *("image/jpeg", "image/png", "image/webp", "image/tiff", "image/gif", "image/bmp", "image/avif", "image/heic"),
        *("image/heif", "image/jxl", "image/jp2", "image/j2c", "image/x-portable-anymap", "image/x-portable-bitmap"),
        *("image/x-portable-graymap", "image/x-portable-pixmap", "image/x-icon", "image/x-tga"),
    }
)
DEPTH_TYPES = frozenset({"image/png", "image/tiff"})
AUDIO_TYPES = frozenset(
    f"audio/{kind}"
    for kind in (
        *("wav", "flac", "ogg", "mpeg", "mp4", "aac", "ac3", "eac3", "aiff", "amr", "basic", "webm"),
        *("x-caf", "x-w64", "x-wavpack", "x-matroska", "x-ms-wma"),
    )
)
ARRAY_TYPES = frozenset({"application/x-npy"})
SUBTITLES = ("srt", "vtt", "lrc")

REASONS: Mapping[str, str] = {
    "interleaved": "only text and image, in an order that the JSON or the frames of a TIFF give",
    "music": "at least half of the samples have a MIDI row",
    "robotics": "images or video, and at least half of the samples have an array of a robot, or depth",
    "document": "only text and image, and more than half of the JSONs have a known page layout",
    "video": "only video, audio and text, and at most one video per sample",
    "image_text": "text and image without roles, at most one of each, and every sample has its image",
    "speech": "text and audio without roles, and every sample has one audio",
    "generic": "no other preset has a place for every row",
}
"""Why samples get a preset that is not declared (docs/packing.md, "Without `pack`")."""

CLOCKS = frozenset({"timestamp", "timestamps", "time", "times"})  # roles of the array that dates the others' rows
TIMED_KEYS = ("words", "word_timestamps", "word_timings", "alignment", "segments")  # of a JSON, in order of preference
ROBOT_ROLES = frozenset(
    {"state", "action", "pose", "joints", "qpos", "qvel", "proprio", "proprioception", "timestamp", "depth"}
)
TASK_KEYS = ("task", "language_instruction", "instruction")


@dataclass(slots=True)
class Group:
    """Content rows of one modality and role, counted."""

    modality: str
    role: str
    num_rows: int = 0
    num_samples: int = 0
    most: int = 0  # rows in one sample
    types: Counter[str] = field(default_factory=Counter)

    def made_field(self) -> Field:
        """The field that most of the rows' types call for; `rest` has the others."""
        inner = self._inner()
        return SequenceField(inner) if self.many else inner

    def update(self, other: Group) -> None:
        """Adds the rows of other samples."""
        self.num_rows += other.num_rows
        self.num_samples += other.num_samples
        self.most = max(self.most, other.most)
        self.types += other.types

    @property
    def many(self) -> bool:
        """Whether a sample may have several."""
        return self.most > 1 or self.role == NUMBERED

    def _inner(self) -> Field:
        if self.modality == "text":
            return TextField()
        known: dict[str, tuple[frozenset[str], Callable[[], Field]]] = {
            "image": (IMAGE_TYPES, ImageField),
            "audio": (AUDIO_TYPES, AudioField),
            "video": (VIDEO_TYPES, SyncedVideoAudioField),
            "array": (ARRAY_TYPES, NDArrayField),
        }
        types, made = known.get(self.modality, (frozenset(), BytesField))
        return made() if self.mostly(types) else BytesField()

    def mostly(self, types: frozenset[str]) -> bool:
        """Whether at least half of the rows have, by name, one of these types."""
        return 2 * sum(count for kind, count in self.types.items() if kind in types) >= self.num_rows


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


Kind = tuple[tuple[str, str, bool], ...]
"""What a sample consists of: row modality, role and whether there are several of each, sorted; () of metadata alone."""


@dataclass(slots=True)
class _Counts:
    """The rows of some samples, counted."""

    num_samples: int = 0
    groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    interleaved: bool = False
    most: Counter[str] = field(default_factory=Counter)  # row modality -> most rows of it in a sample
    least: dict[str, int] = field(default_factory=dict)
    samples_of: Counter[str] = field(default_factory=Counter)  # row modality, or "robot" -> samples that have it
    num_json: int = 0
    num_layouts: int = 0
    json_kinds: dict[str, set[str]] = field(default_factory=dict)  # top-level key -> what its values are
    most_plain: int = 0  # texts in a sample
    most_timed: int = 0
    members: list[tuple[str, str | None]] = field(default_factory=list)  # the first ones, with their file
    example: list[RowName] = field(default_factory=list)  # the content rows of the first sample

    def update(self, other: _Counts) -> None:
        """Adds the counts of other samples."""
        self.num_samples += other.num_samples
        for key, group in other.groups.items():
            self.groups.setdefault(key, Group(*key)).update(group)
        self.interleaved |= other.interleaved
        self.most |= other.most
        for modality, count in other.least.items():
            self.least[modality] = min(self.least.get(modality, count), count)
        self.samples_of += other.samples_of
        self.num_json += other.num_json
        self.num_layouts += other.num_layouts
        for name, kinds in other.json_kinds.items():
            self.json_kinds.setdefault(name, set()).update(kinds)
        self.most_plain = max(self.most_plain, other.most_plain)
        self.most_timed = max(self.most_timed, other.most_timed)

    def preset(self) -> str:
        """The preset that fits: each content row of every sample has a place in it."""
        modalities = set(self.most)
        plain = all(not role for _, role in self.groups)
        single = all(count == 1 for count in self.most.values())
        if self.interleaved and modalities <= {"text", "image"}:
            return "interleaved"
        if "midi" in modalities and self._usually("midi"):
            return "music"
        if modalities & {"image", "video"} and self._usually("robot"):
            return "robotics"
        if 2 * self.num_layouts > self.num_json and modalities <= {"text", "image"} and self.least["image"]:
            return "document"
        if "video" in modalities and modalities <= {"video", "audio", "text"} and self.most["video"] == 1:
            return "video" if self._mostly("video", VIDEO_TYPES) else "generic"
        if plain and single and modalities == {"text", "image"} and self.least["image"]:
            return "image_text"
        if "audio" in modalities and modalities <= {"text", "audio"} and self.least["audio"] and self._one_text():
            return "speech" if self._mostly("audio", AUDIO_TYPES) else "generic"
        return "generic"

    def _usually(self, what: str) -> bool:
        return self.samples_of[what] > 0 and 2 * self.samples_of[what] >= self.num_samples

    def _mostly(self, modality: str, types: frozenset[str]) -> bool:
        groups = [group for group in self.groups.values() if group.modality == modality]
        return all(group.mostly(types) for group in groups)

    def _one_text(self) -> bool:
        """Whether no sample has more than one audio row, one plain text and one timed text, without roles."""
        plain = all(not role for _, role in self.groups)
        one_each = self.most["audio"] == 1 and self.most_plain <= 1 and self.most_timed <= 1
        return plain and one_each and "text" in self.most

    def takes(self, other: _Counts) -> bool:
        """Whether samples of another kind are of the same sort: the same preset fits both, and they share something."""
        joined = _Counts()
        joined.update(self)
        joined.update(other)
        shared = self.most.keys() & other.most.keys()
        return joined.preset() == self.preset() and bool(shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleKind:
    """Samples that consist of the same, counted.

    Attributes:
        kind: what they consist of.
        num_samples: how many there are.
        fits: whether the layout was made for them; the others are listed and changed nothing.
        members: the first members of the first of them, each with its file.
        example: content rows of the first of them, `MAX_EXAMPLE` at most.
        unplaced: kinds of those that no packed modality takes, once the plan is known.
    """

    kind: Kind
    num_samples: int
    fits: bool
    members: tuple[tuple[str, str | None], ...]
    example: tuple[RowName, ...] = ()
    unplaced: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " + ".join(group_name(*part) for part in self.kind) or "metadata alone"


def shown_role(role: str) -> str:
    """A role as kinds of row have it: all whole numbers are one."""
    return NUMBERED if role.isascii() and role.isdigit() else role


def group_name(modality: str, role: str, many: bool = False) -> str:
    """A kind of row in words: ``image (role: left)``, ``several text``."""
    name = f"{modality} (numbered)" if role == NUMBERED else f"{modality} (role: {role})" if role else modality
    return f"several {name}" if many and role != NUMBERED else name


@dataclass(slots=True)
class RowCount:
    """Content rows of one modality and role, claimed ones too, counted."""

    num_samples: int = 0
    num_rows: int = 0
    extensions: Counter[str] = field(default_factory=Counter)


class Survey:
    """The kinds of row in each sample.

    Kinds of sample that are together less than 20 % of all, of which no tenth of the shards mostly consists, and that
    the others' preset does not fit, decide nothing.

    Args:
        claimed: packed modalities that are declared: the rows that they take decide nothing either.

    Attributes:
        rows: every content row that was read, by row modality and role.
    """

    def __init__(self, claimed: tuple[PackedModality, ...] = ()) -> None:
        self._claimed = claimed
        self._claiming = [
            selector
            for modality in claimed
            for selector in modality.selectors.values()
            if selector.take != "shared"  # which leaves the row to others
        ]
        self.rows: dict[tuple[str, str], RowCount] = {}
        self._kinds: dict[Kind, _Counts] = {}
        self._shards: dict[str, Counter[Kind]] = {}
        self._settled: tuple[_Counts, set[Kind], set[Kind]] | None = None

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
        one = _Counts(num_samples=1)
        json_member: str | None = None
        content: dict[str, Any] = {}
        texts: Counter[bool] = Counter()  # plain (False) and timed (True)
        extensions: dict[tuple[str, str], Counter[str]] = {}
        for row in sample:
            if row.member is not None and len(one.members) < MAX_SHOWN and (row.member, row.path) not in one.members:
                one.members.append((row.member, row.path))
            if row.modality == "metadata":
                json_member = row.member
                content = _survey_json(one, row.json)
                continue
            # Text out of the sample's JSON, and frames of one file: rows whose order matters.
            one.interleaved |= row.frame is not None or (
                row.modality == "text" and row.member is not None and row.member == json_member
            )
            _, role, extension = split_member_name(row.member) if row.member else ("", "", "")
            if len(one.example) < MAX_EXAMPLE:
                one.example.append((row.modality, role, extension))
            key = (row.modality, shown_role(role))
            extensions.setdefault(key, Counter())[extension] += 1
            if any(selector.rank(row.modality, role, extension) is not None for selector in self._claiming):
                continue
            group = one.groups.setdefault(key, Group(*key))
            group.num_rows += 1
            group.types[(row.content_type or "").partition(";")[0]] += 1
            if row.modality == "text":
                texts[extension in SUBTITLES] += 1
        for key, found in extensions.items():
            count = self.rows.setdefault(key, RowCount())
            count.num_samples += 1
            count.num_rows += found.total()
            count.extensions += found
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

    def _settle(self) -> tuple[_Counts, set[Kind], set[Kind]]:
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
            main = _Counts()
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
        clock = self._clock()

        def choose(group: Group, selector: Selector) -> tuple[Field, dict[str, Selector] | None]:
            if group.many:
                return group.made_field(), None
            last = group.role.rsplit(".", 1)[-1].lower()
            if group.modality == "video" and group.mostly(VIDEO_TYPES):
                return SyncedVideoAudioField(), None
            if group.modality == "image" and "depth" in group.role.lower() and group.mostly(DEPTH_TYPES):
                return DepthField(), None
            dated = clock is not None and 2 * clock.num_samples >= group.num_samples
            if group.modality == "array" and clock is not None and dated and group is not clock and last not in CLOCKS:
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

    def _clock(self) -> Group | None:
        """The array that dates the rows of the other arrays."""
        arrays = [group for group in self._settle()[0].groups.values() if group.modality == "array" and not group.many]
        clocks = [group for group in arrays if group.role.rsplit(".", 1)[-1].lower() in CLOCKS]
        return min(clocks, key=lambda group: (-group.num_samples, group.role)) if clocks else None

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


def _survey_json(counts: _Counts, text: str | None) -> dict[str, Any]:
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
    return role if role == NUMBERED else re.sub(r"([*?\[])", r"[\1]", role)


def _free_name(group: Group, taken: dict[int, str]) -> str:
    """A name from the group's role, that no other modality has."""
    role = "" if group.role == NUMBERED else re.sub(r"[\x00-\x1f\x7f\s]+", "_", group.role)[:MAX_NAME]
    plain = role or group.modality
    longer = f"{group.modality}_{role}" if role else group.modality
    wishes = itertools.chain([plain, longer], (f"{longer}_{number}" for number in itertools.count(2)))
    name = next(wish for wish in wishes if name_hash(wish) not in taken)
    taken[name_hash(name)] = name
    return name
