"""The kinds of row and of sample, counted by names and JSON, and the preset that fits what was counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mm_assets.fields import (
    AudioField,
    BytesField,
    Field,
    ImageField,
    NDArrayField,
    SequenceField,
    SyncedVideoAudioField,
    TextField,
)
from mm_assets.media.video import VIDEO_TYPES
from mm_assets.packing.plan import NUMBERED, RowName
from mm_assets.sources.member import is_numbered

__all__ = [
    "AUDIO_TYPES",
    "DEPTH_TYPES",
    "IMAGE_TYPES",
    "REASONS",
    "SUBTITLES",
    "Counts",
    "Group",
    "Kind",
    "RowCount",
    "SampleKind",
    "group_name",
    "shown_role",
]

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
    "interleaved": "only text and image, in an order that the JSON, the frames of a TIFF or the pages of a PDF give",
    "music": "at least half of the samples have a MIDI row",
    "robotics": "images or video, and at least half of the samples have an array of a robot, or depth",
    "document": "only text and image, and more than half of the JSONs have a known page layout, or are of PDFs",
    "video": "only video, audio and text, and at most one video per sample",
    "image_text": "text and image without roles, at most one of each, and every sample has its image",
    "speech": "text and audio without roles, and every sample has one audio",
    "generic": "no other preset has a place for every row",
}
"""Why samples get a preset that is not declared (docs/spec/packing.md, "Without `pack`")."""


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
        return self.most > 1 or is_numbered(self.role)

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
        """Whether at least half of the rows have, by name, one of these types, or none that a name gives.

        A row whose name gives no type has the modality that the declaration, or a list of files, says it has.
        """
        return 2 * sum(count for kind, count in self.types.items() if kind in types or not kind) >= self.num_rows


Kind = tuple[tuple[str, str, bool], ...]
"""What a sample consists of: row modality, role and whether there are several of each, sorted; () of metadata alone."""


@dataclass(slots=True)
class Counts:
    """The rows of some samples, counted."""

    num_samples: int = 0
    groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    interleaved: bool = False
    most: Counter[str] = field(default_factory=Counter)  # row modality -> most rows of it in a sample
    least: dict[str, int] = field(default_factory=dict)
    samples_of: Counter[str] = field(default_factory=Counter)  # row modality, or "robot" -> samples that have it
    num_json: int = 0
    num_layouts: int = 0
    num_pdfs: int = 0  # samples of a PDF, beside texts, whose pages are not rows
    num_paged: int = 0  # samples with the pages of a PDF
    json_kinds: dict[str, set[str]] = field(default_factory=dict)  # top-level key -> what its values are
    most_plain: int = 0  # texts in a sample
    most_timed: int = 0
    members: list[tuple[str, str | None]] = field(default_factory=list)  # the first ones, with their file
    example: list[RowName] = field(default_factory=list)  # the content rows of the first sample

    def update(self, other: Counts) -> None:
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
        self.num_pdfs += other.num_pdfs
        self.num_paged += other.num_paged
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

    def takes(self, other: Counts) -> bool:
        """Whether samples of another kind are of the same sort: the same preset fits both, and they share something."""
        joined = Counts()
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
    """A role as kinds of row have it: all whole numbers at its end are one."""
    head, dot, number = role.rpartition(".")
    return head + dot + NUMBERED if number.isascii() and number.isdigit() else role


def group_name(modality: str, role: str, many: bool = False) -> str:
    """A kind of row in words: ``image (role: left)``, ``several text``."""
    name = f"{modality} (numbered)" if role == NUMBERED else f"{modality} (role: {role})" if role else modality
    return f"several {name}" if many and not is_numbered(role) else name


@dataclass(slots=True)
class RowCount:
    """Content rows of one modality and role, claimed ones too, counted."""

    num_samples: int = 0
    num_rows: int = 0
    extensions: Counter[str] = field(default_factory=Counter)
