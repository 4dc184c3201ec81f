"""The type ids of this package's own fields; importing `mm_assets.fields` puts them into the tables of the registry.

Field classes may import the registry, as `SequenceField` does for its inner field, so the registry imports none.
"""

from __future__ import annotations

from mm_assets.fields.audio import AudioField
from mm_assets.fields.depth import DepthField
from mm_assets.fields.document import DocumentField
from mm_assets.fields.image import ImageField
from mm_assets.fields.image_text import ImageTextPairField
from mm_assets.fields.midi import MIDIField
from mm_assets.fields.ndarray import NDArrayField
from mm_assets.fields.plain import BytesField, JSONField, TextField
from mm_assets.fields.registry import FIELD_NAMES, FIELD_TYPES
from mm_assets.fields.scalar import ScalarField
from mm_assets.fields.sequence import SequenceField
from mm_assets.fields.timed_text import TimedTextField
from mm_assets.fields.timeseries import TimeSeriesField
from mm_assets.fields.tokens import TokensField
from mm_assets.fields.video_audio import SyncedVideoAudioField

__all__ = ["FIELD_NAMES", "FIELD_TYPES"]

FIELD_TYPES.update(
    {
        1: BytesField,
        2: TextField,
        3: JSONField,
        4: NDArrayField,
        5: ScalarField,
        10: ImageField,
        11: DepthField,
        20: TokensField,
        21: TimedTextField,
        40: AudioField,
        41: MIDIField,
        42: TimeSeriesField,
        50: SyncedVideoAudioField,
        51: ImageTextPairField,
        52: DocumentField,
        60: SequenceField,
    }
)
FIELD_NAMES.update({cls.__name__: cls for cls in FIELD_TYPES.values()})
