"""Music as notes for people: the notes of a Standard MIDI File, for a piano roll."""

from __future__ import annotations

from mm_assets.display.item import Content, Item, human_bytes, human_seconds, stored, unreadable_item
from mm_assets.errors import MediaError
from mm_assets.media.midi import parse_midi

__all__ = ["midi_item"]

MAX_NOTES = 6000  # that are drawn
_MAX_BYTES = 8 << 20
_MAX_PARSED = 500_000


def midi_item(name: str, content: Content, content_type: str) -> Item:
    """A MIDI file: its notes as (onset, duration, pitch, velocity, channel), times in seconds."""
    if content.size > _MAX_BYTES:
        reason = f"It has {human_bytes(content.size)}, and at most {human_bytes(_MAX_BYTES)} are read as music."
        return unreadable_item(name, reason, size=content.size, content_type=content_type)
    try:
        file = parse_midi(content.whole(), max_bytes=_MAX_BYTES, max_notes=_MAX_PARSED)
    except MediaError as error:
        reason = f"It cannot be read as MIDI: {error.reason}."
        return unreadable_item(name, reason, size=content.size, content_type=content_type)
    notes = file.notes()
    count = min(len(notes), MAX_NOTES)
    rows = [
        [round(onset, 4), round(length, 4), pitch, velocity, channel]
        for onset, length, pitch, velocity, channel in zip(
            notes.onset_seconds[:count].tolist(),
            notes.duration_seconds[:count].tolist(),
            notes.pitch[:count].tolist(),
            notes.velocity[:count].tolist(),
            notes.channel[:count].tolist(),
            strict=True,
        )
    ]
    facts = {"notes": f"{len(notes):,}", "tracks": f"{file.num_tracks:,}"}
    facts |= {"duration": human_seconds(file.duration_seconds), "bytes": human_bytes(content.size)}
    data = {
        "notes": rows,
        "duration": file.duration_seconds,
        "lowest": int(notes.pitch.min()) if len(notes) else 60,
        "highest": int(notes.pitch.max()) if len(notes) else 72,
    }
    note = f"Drawn are the first {count:,} of {len(notes):,} notes." if count < len(notes) else ""
    media = (stored("file", content, "audio/midi"),)
    return Item(name=name, kind="midi", facts=facts, data=data, media=media, note=note)
