"""The kinds of row of each sample of a shard, and the contents of its JSON.

Counted once, at registration, over the rows of the first shard. Content has not been read by then, so names and JSON
decide. `Survey.preset` chooses a preset that loses none of these rows; `generic` and `robotics` make their packed
modalities from the kinds of row that were found.
"""

from __future__ import annotations

import itertools
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
from mm_assets.packing.plan import NUMBERED, PackedModality, Selector, Take
from mm_assets.rows.source_ref import with_parsed_source_ref_columns
from mm_assets.sources.member import split_member_name

__all__ = ["MAX_GROUPS", "Survey"]

MAX_GROUPS = MAX_MODALITIES - 3  # of `generic`, in addition to `rest`, `rows` and `metadata`
MAX_NAME = 64  # characters of a name that is made from a role
MAX_PARSED = 1000  # samples whose JSON is parsed

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
    member: str | None
    frame: int | None


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[_Row]:
    for batch in batches:
        names = ["sample_id", "modality", "content_type", "metadata_json", "source_ref"]
        table = with_parsed_source_ref_columns(pa.Table.from_batches([batch]).select(names))
        columns = [*names[:4], "_src_member", "_src_frame_index"]
        yield from map(_Row, *(table.column(name).to_pylist() for name in columns))


class Survey:
    """The kinds of row in each sample of a shard; rows of the modalities in `claimed` are not counted."""

    def __init__(self, claimed: tuple[PackedModality, ...] = ()) -> None:
        self._claimed = claimed
        self._claiming = [
            selector
            for modality in claimed
            for selector in modality.selectors.values()
            if selector.take != "shared"  # which leaves the row to others
        ]
        self.groups: dict[tuple[str, str], Group] = {}
        self.interleaved = False
        self.most: Counter[str] = Counter()  # row modality -> most rows of it in a sample
        self.least: dict[str, int] = {}
        self._num_json = 0
        self._num_layouts = 0
        self._json_kinds: dict[str, set[str]] = {}  # top-level key -> what its values are
        self._most_plain = self._most_timed = 0  # texts in a sample

    def read(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Counts the rows of all batches."""
        for _, sample in itertools.groupby(_rows(batches), key=operator.attrgetter("sample_id")):
            self._count(sample)

    def _count(self, sample: Iterable[_Row]) -> None:
        """Counts the rows of one sample, its metadata row first."""
        json_member: str | None = None
        counts: Counter[tuple[str, str]] = Counter()  # modality and role -> rows
        texts: Counter[bool] = Counter()  # plain (False) and timed (True)
        for row in sample:
            if row.modality == "metadata":
                json_member = row.member
                self._survey_json(row.json)
                continue
            # Text out of the sample's JSON, and frames of one file: rows whose order matters.
            self.interleaved |= row.frame is not None or (
                row.modality == "text" and row.member is not None and row.member == json_member
            )
            _, role, extension = split_member_name(row.member) if row.member else ("", "", "")
            if any(selector.rank(row.modality, role, extension) is not None for selector in self._claiming):
                continue
            key = (row.modality, NUMBERED if role.isascii() and role.isdigit() else role)
            group = self.groups.setdefault(key, Group(*key))
            group.num_rows += 1
            group.types[(row.content_type or "").partition(";")[0]] += 1
            counts[key] += 1
            if row.modality == "text":
                texts[extension in SUBTITLES] += 1
        by_modality: Counter[str] = Counter()
        for key, count in counts.items():
            group = self.groups[key]
            group.num_samples += 1
            group.most = max(group.most, count)
            by_modality[key[0]] += count
        self.most |= by_modality
        for modality in ("text", "image", "audio"):
            self.least[modality] = min(self.least.get(modality, by_modality[modality]), by_modality[modality])
        self._most_plain = max(self._most_plain, texts[False])
        self._most_timed = max(self._most_timed, texts[True])

    def _survey_json(self, text: str | None) -> None:
        if text is None or self._num_json >= MAX_PARSED:
            return
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):  # reported when the sample is packed
            return
        if not isinstance(content, dict):
            return
        self._num_json += 1
        self._num_layouts += detect_layout(content) is not None
        for key in (*TIMED_KEYS, *TASK_KEYS, "timestamp"):
            if content.get(key) is not None:
                self._json_kinds.setdefault(key, set()).add(_kind_of(content[key]))

    def json_key(self, keys: Iterable[str], kind: str) -> str | None:
        """The first of some keys whose values in the samples' JSON are all of one kind."""
        return next((key for key in keys if self._json_kinds.get(key) == {kind}), None)

    def preset(self) -> str:
        """The preset that fits: each content row of every sample has a place in it."""
        modalities = set(self.most)
        plain = all(not role for _, role in self.groups)
        single = all(count == 1 for count in self.most.values())
        if self.interleaved and modalities <= {"text", "image"}:
            return "interleaved"
        if "midi" in modalities:
            return "music"
        if modalities & {"image", "video"} and any(_is_robot(group) for group in self.groups.values()):
            return "robotics"
        if 2 * self._num_layouts > self._num_json and modalities <= {"text", "image"} and self.least["image"]:
            return "document"
        if "video" in modalities and modalities <= {"video", "audio", "text"} and self.most["video"] == 1:
            return "video" if self._mostly("video", VIDEO_TYPES) else "generic"
        if plain and single and modalities == {"text", "image"} and self.least["image"]:
            return "image_text"
        if "audio" in modalities and modalities <= {"text", "audio"} and self.least["audio"] and self._one_text():
            return "speech" if self._mostly("audio", AUDIO_TYPES) else "generic"
        return "generic"

    def _mostly(self, modality: str, types: frozenset[str]) -> bool:
        groups = [group for group in self.groups.values() if group.modality == modality]
        return all(group.mostly(types) for group in groups)

    def _one_text(self) -> bool:
        """Whether no sample has more than one audio row, one plain text and one timed text, without roles."""
        plain = all(not role for _, role in self.groups)
        one_each = self.most["audio"] == 1 and self._most_plain <= 1 and self._most_timed <= 1
        return plain and one_each and "text" in self.most

    def generic(self) -> list[PackedModality]:
        """A packed modality for each of the most frequent groups, in a fixed order."""
        return self._discovered(lambda group, _: (group.made_field(), None), MAX_GROUPS)

    def robotics(self) -> list[PackedModality]:
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
            if group.modality == "array" and clock is not None and group is not clock and last not in CLOCKS:
                dates = Selector(modality="array", role=_pattern(clock.role), take="shared")
                return TimeSeriesField(), {"timestamps": dates, "values": selector}
            return group.made_field(), None

        found = self._discovered(choose, MAX_GROUPS - 2)  # two more come out of the JSON
        taken = {modality.name for modality in (*found, *self._claimed)}
        task = self.json_key(TASK_KEYS, "text")
        if task is not None and "task" not in taken:
            found.append(PackedModality.of("task", TextField(), _at(task)))
        if self.json_key(("timestamp",), "number") is not None and "timestamp" not in taken:
            found.append(PackedModality.of("timestamp", ScalarField("float64"), _at("timestamp")))
        return found

    def _clock(self) -> Group | None:
        """The array that dates the rows of the other arrays."""
        arrays = [group for group in self.groups.values() if group.modality == "array" and not group.many]
        clocks = [group for group in arrays if group.role.rsplit(".", 1)[-1].lower() in CLOCKS]
        return min(clocks, key=lambda group: (-group.num_samples, group.role)) if clocks else None

    def _discovered(
        self, choose: Callable[[Group, Selector], tuple[Field, dict[str, Selector] | None]], limit: int
    ) -> list[PackedModality]:
        limit -= len(self._claimed)
        frequent = sorted(self.groups.values(), key=lambda g: (-g.num_rows, g.modality, g.role))[: max(limit, 0)]
        reserved = {name_hash(name): name for name in ("rest", "rows", "metadata", *(m.name for m in self._claimed))}
        modalities = []
        for group in sorted(frequent, key=lambda g: (g.modality, g.role)):
            name = _free_name(group, reserved)
            take: Take = "sequence" if group.many else "one"
            selector = Selector(modality=group.modality, role=_pattern(group.role), take=take)
            made, parts = choose(group, selector)
            modalities.append(PackedModality.of(name, made, None if parts else selector, parts=parts))
        return modalities


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
