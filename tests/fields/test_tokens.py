import io
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets.dataset.dataset
from mm_assets.errors import ConfigError, EncodeError, FormatError, LimitError
from mm_assets.fields import TokensField, field_from_config
from mm_assets.media.tokenizers import ByteTokenizer
from mm_assets.testing import FieldSuite

BYTES = ByteTokenizer()


def npy(array: np.ndarray) -> bytes:
    target = io.BytesIO()
    np.save(target, array)
    return target.getvalue()


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def decoded(field: TokensField, value: Any) -> list[int]:
    return field.decode(*field.encode(value)).tolist()


def counts(field: TokensField, metadata: bytes) -> tuple[int, int]:
    """How many ids the record says are stored, and how many were removed."""
    return np.frombuffer(metadata, field.metadata_type)[["num_tokens", "num_cut"]][0].item()


class TestTokensField(FieldSuite):
    fields = [
        TokensField(tokenizer="bytes"),
        TokensField(),
        TokensField(vocab_size=50_257, max_tokens=7, truncate="left", keep_start=1, decoded="int32"),
        TokensField(vocab_size=100_000, pad_id=-100, max_tokens=7),
        TokensField(tokenizer={"name": "clip", "sha256": "c" * 64}, vocab_size=49_408),
    ]
    cases = [
        ([1, 68, 2], ids(1, 68, 2)),
        ("é", ids(1, 198, 172, 2)),
        (b"A", ids(1, 68, 2)),
        (np.array([258, 0], np.uint16), ids(258, 0)),
        (np.arange(10, dtype=">i8")[::3], ids(0, 3, 6, 9)),
        ((np.int32(5), 6), ids(5, 6)),
        (npy(np.array([7, 8], np.uint32)), ids(7, 8)),
    ]
    empty = ([], ids())
    maximum = (TokensField(vocab_size=10, max_tokens=3, truncate="error"), [9, 9, 9])
    past_maximum = (TokensField(vocab_size=10, max_tokens=3, truncate="error"), [9, 9, 9, 9])
    wrong_types = [5, 5.0, {"ids": [1]}, [1.0], [True], [None], ["1"], np.array([1.5]), np.zeros((2, 2), int), [[1]]]
    wrong_shapes = [
        [259],
        [-1],
        np.array([300]),
        [2**70],
        "\ud800",
        b"\xff",
        npy(np.zeros(2)),
        npy(np.zeros((2, 2), int)),
    ]
    bad_configs = [
        {"vocab_size": 0},
        {"vocab_size": 2**32 + 1},
        {"vocab_size": 5.0},
        {"vocab_size": 258, "tokenizer": "bytes"},
        {"tokenizer": "gpt2"},
        {"tokenizer": {"name": "clip", "sha256": "c" * 64}},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"truncate": "middle"},
        {"keep_end": -1},
        {"keep_end": 4, "max_tokens": 3},
        {"decoded": "float32"},
        {"vocab_size": 65_537, "decoded": "uint16"},
        {"decoded": "uint16", "pad_id": -100},
        {"pad_id": 1.5},
    ]


@pytest.mark.parametrize(("vocab_size", "width"), [(1, 2), (65_536, 2), (65_537, 4), (2**32, 4)])
def test_the_vocabulary_decides_the_width(vocab_size, width):
    """Ids take two bytes up to a vocabulary of 65,536 and four past it; the record says so, and none wraps."""
    field = TokensField(vocab_size=vocab_size)
    metadata, data = field.encode([vocab_size - 1, 0])
    assert len(data) == 2 * width
    assert (int.from_bytes(metadata[:4], "little"), metadata[8]) == (2, width)
    assert field.decode(metadata, data).tolist() == [vocab_size - 1, 0]
    with pytest.raises(EncodeError, match="vocab_size"):
        field.encode([vocab_size])


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.sampled_from([None, 1, 5, 40]))
@settings(deadline=None, max_examples=100)
def test_batches_are_filled_and_masked(values, max_tokens):
    """A row has the ids that there is room for, then the fill, and a mask of which is which."""
    field = TokensField(max_tokens=max_tokens, pad_id=-1)
    metadata, data = field.encode(values)
    records = np.frombuffer(metadata, np.uint8).reshape(1, -1)
    batch, present = field.decode_batch(records, [data])
    assert present.tolist() == [True]
    if max_tokens is None:
        assert batch[0].tolist() == values
        return
    kept = values[:max_tokens]
    assert batch["input_ids"].tolist() == [kept + [-1] * (max_tokens - len(kept))]
    assert batch["attention_mask"].tolist() == [[1] * len(kept) + [0] * (max_tokens - len(kept))]
    assert counts(field, metadata) == (len(kept), len(values) - len(kept))


def test_a_batch_goes_into_given_arrays():
    """Rows are written whole into arrays that are there, absent ones as zeros."""
    field = TokensField(vocab_size=100, max_tokens=4, pad_id=9, decoded="uint16")
    metadata, data = field.encode([1, 2])
    out = {"input_ids": np.full((2, 4), 77, np.uint16), "attention_mask": np.full((2, 4), 77, np.int64)}
    records = np.frombuffer(metadata + bytes(16), np.uint8).reshape(2, -1)
    batch, present = field.decode_batch(records, [data, None], out=out)
    assert batch["input_ids"] is out["input_ids"]
    assert out["input_ids"].tolist() == [[1, 2, 9, 9], [0, 0, 0, 0]]
    assert out["attention_mask"].tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]
    assert present.tolist() == [True, False]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"truncate": "right"}, [1, *b"abc", 2]),  # the special end stays last, as CLIP needs it
        ({"truncate": "right", "keep_end": 0}, [1, *b"abcd"]),
        ({"truncate": "right", "keep_end": 2}, [1, *b"abh", 2]),
        ({"truncate": "right", "keep_end": 5}, [*b"efgh", 2]),
        ({"truncate": "left"}, [1, *b"fgh", 2]),
        ({"truncate": "left", "keep_start": 0}, [*b"efgh", 2]),
        ({"truncate": "left", "keep_start": 5}, [1, *b"abcd"]),
    ],
)
def test_truncation_is_as_asked(options, kept):
    """Truncation keeps the ids that it promises, while encoding and alike while decoding a longer payload."""
    kept = [i if i < 3 else i + 3 for i in kept]
    field = TokensField(tokenizer="bytes", max_tokens=5, **options)
    assert decoded(field, "abcdefgh") == kept
    whole = TokensField(tokenizer="bytes").encode("abcdefgh")
    assert field.decode(*whole).tolist() == kept
    assert counts(field, field.encode("abcdefgh").metadata) == (5, 5)
    with pytest.raises(EncodeError, match="max_tokens"):
        TokensField(tokenizer="bytes", max_tokens=5, truncate="error").encode("abcdefgh")
    with pytest.raises(LimitError, match="max_tokens"):
        TokensField(vocab_size=259, max_tokens=5, truncate="error").decode(*whole)


def test_ids_outside_the_vocabulary_are_damage():
    """A payload whose ids a smaller vocabulary or dtype does not have is refused, since an embedding would crash."""
    payload = TokensField(vocab_size=65_536).encode([5, 300])
    with pytest.raises(FormatError, match="vocabulary"):
        TokensField(vocab_size=300).decode(*payload)
    wide = TokensField().encode([2**32 - 1])
    assert TokensField().decode(*wide).tolist() == [2**32 - 1]
    with pytest.raises(FormatError, match="vocabulary"):
        TokensField(decoded="int32").decode(*wide)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint32", "uint16"])
def test_ids_come_in_the_dtype_asked_for(dtype):
    """Ids are decoded to the dtype of the setting; as they are stored, they are a view that copies nothing."""
    field = TokensField(vocab_size=1000, decoded=dtype)
    metadata, data = field.encode([1, 999])
    found = field.decode(metadata, data)
    assert found.dtype == np.dtype(dtype)
    assert np.shares_memory(found, np.frombuffer(data, np.uint8)) == (dtype == "uint16")
    assert found.flags.writeable == (dtype != "uint16")


def test_text_needs_a_tokenizer_at_hand():
    """Without a tokenizer text is refused; where only its identity is known, the error names the digest."""
    with pytest.raises(EncodeError, match="needs a tokenizer"):
        TokensField(vocab_size=10).encode("text")
    bare = TokensField(vocab_size=10, tokenizer={"name": "clip", "sha256": "c" * 64})
    with pytest.raises(EncodeError, match="c" * 64):
        bare.encode("text")
    assert decoded(bare, [9]) == [9]


def test_a_packed_file_needs_no_tokenizer_and_has_no_path(tmp_path):
    """The same tokenizer JSON in two folders gives the same packed bytes, read once the JSON is gone."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"[UNK]": 0, "dog": 1, "cat": 2}
    content = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]")).to_str()
    packed = []
    for folder in ("one", "another"):
        (tmp_path / folder).mkdir()
        place = tmp_path / folder / "tokenizer.json"
        place.write_text(content)
        field = field_from_config("TokensField", {"tokenizer": {"file": str(place)}, "max_tokens": 3})
        assert str(tmp_path) not in json.dumps(field.config)
        target = tmp_path / f"{folder}.mult"
        with mm_assets.dataset.dataset.create(target, {"words": field}) as writer:
            writer.write("a", {"words": "dog"})
            writer.write("b", {"words": None})
        place.unlink()
        packed.append(target.read_bytes())
        with mm_assets.dataset.dataset.open(target) as dataset:
            assert dataset[0]["words"].tolist() == [1]
            assert dataset[1]["words"] is None
            batch = dataset.read_batch([0, 1])["words"]
            assert batch.values["attention_mask"].tolist() == [[1, 0, 0], [0, 0, 0]]
            with pytest.raises(EncodeError, match=re.escape(dataset.fields["words"].tokenizer.sha256)):
                dataset.fields["words"].encode("dog")
    assert packed[0] == packed[1]


def test_what_the_tokenizer_has_settled_stays_settled():
    """A restored configuration has the vocabulary, fill and special ids, though the tokenizer is not there."""
    field = TokensField(tokenizer="bytes", max_tokens=5)
    config = {**field.config, "tokenizer": {"name": "other", "sha256": "d" * 64}}
    restored = TokensField.from_config(config)
    assert (restored.vocab_size, restored.keep_start, restored.keep_end, restored.pad_id) == (259, 1, 1, 0)
    with pytest.raises(ConfigError, match="only the identity"):
        TokensField.from_config({"tokenizer": config["tokenizer"]})


def test_real_captions(shared_data, members_of):
    """Every caption of the sample corpora comes back from its byte ids."""
    field = TokensField(tokenizer="bytes")
    count = 0
    for name, data in members_of(shared_data, (".txt",)):
        if not name.startswith("image-text"):
            continue
        count += 1
        assert BYTES.decode(decoded(field, data)) == data.decode()
    assert count > 100
