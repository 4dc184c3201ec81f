import hashlib
import json
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import ConfigError, EncodeError, MissingExtraError
from mm_assets.media.tokenizers import ByteTokenizer, JSONTokenizer, Tokenizer, TokenizerRef, tokenizer_ref

tokenizers = pytest.importorskip("tokenizers")


def word_tokenizer(**options) -> str:
    """The JSON of a small word tokenizer with special tokens at both ends, as CLIP and BERT have them."""
    words = ["[PAD]", "[S]", "[E]", "[UNK]", "a", "small", "red", "dog", "runs", "home"]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[S] $A [E]", special_tokens=[("[S]", 1), ("[E]", 2)]
    )
    if "padding" in options:
        tokenizer.enable_padding(length=options["padding"], pad_id=7)
    if "truncation" in options:
        tokenizer.enable_truncation(options["truncation"])
    return tokenizer.to_str()


WORDS = word_tokenizer()


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@settings(deadline=None, max_examples=100)
def test_bytes_round_trip(text):
    """The built-in tokenizer turns every text into ids below its vocabulary, between its two ends, and back."""
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert (ids[0], ids[-1]) == (1, 2)
    assert all(3 <= i < tokenizer.vocab_size for i in ids[1:-1])
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 0, 0]) == text


def test_the_byte_tokenizer_refuses_what_it_cannot_represent():
    """A lone surrogate has no ids, and an id outside the vocabulary no text; a truncated character is replaced."""
    with pytest.raises(EncodeError, match="surrogates"):
        ByteTokenizer().encode("\ud800")
    for wrong in (259, -1):
        with pytest.raises(ValueError, match="expected 0 to 258"):
            ByteTokenizer().decode([1, wrong])
    assert ByteTokenizer().decode(ByteTokenizer().encode("é")[:2]) == "\ufffd"
    assert ByteTokenizer() == ByteTokenizer()


def test_the_byte_tokenizer_never_changes():
    """Its ids and its identity are fixed: files were packed with them."""
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("Aé") == [1, 68, 198, 172, 2]
    digest = hashlib.sha256(b"UTF-8 bytes: pad 0, begin 1, end 2, byte b is 3 + b").hexdigest()
    assert (tokenizer.name, tokenizer.sha256, tokenizer.vocab_size, tokenizer.pad_id) == ("bytes", digest, 259, 0)
    assert isinstance(tokenizer, Tokenizer)


def test_a_json_tokenizer_is_as_its_library_has_it():
    """Ids, vocabulary, fill and the special ids at both ends are those of the JSON."""
    tokenizer = JSONTokenizer(WORDS)
    assert tokenizer.encode("a red dog barks") == [1, 4, 6, 7, 3, 2]
    assert tokenizer.decode([4, 7]) == "a dog"
    assert (tokenizer.vocab_size, tokenizer.pad_id) == (10, 0)
    assert (tokenizer.num_start_ids, tokenizer.num_end_ids) == (1, 1)
    assert tokenizer.sha256 == hashlib.sha256(WORDS.encode()).hexdigest()
    assert isinstance(tokenizer, Tokenizer)
    with pytest.raises(EncodeError, match="surrogates"):
        tokenizer.encode("\ud800")


def test_the_jsons_own_cuts_and_fills_are_switched_off():
    """Truncation and padding are the field's matter, but the id that fills is taken from the JSON."""
    tokenizer = JSONTokenizer(word_tokenizer(padding=20, truncation=3))
    assert tokenizer.encode("a small red dog") == [1, 4, 5, 6, 7, 2]
    assert tokenizer.pad_id == 7


def test_a_json_tokenizer_pickles():
    """A copy in another process gives the same ids."""
    copy = pickle.loads(pickle.dumps(JSONTokenizer(WORDS, name="words")))
    assert (copy.name, copy.sha256) == ("words", hashlib.sha256(WORDS.encode()).hexdigest())
    assert copy.encode("a dog") == [1, 4, 7, 2]


def test_references_of_one_tokenizer_are_equal(tmp_path):
    """A file, its text and its bare identity are one reference; only the first two can encode."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.json").write_text(WORDS)
    one = tokenizer_ref({"file": str(tmp_path / "a" / "tokenizer.json")})
    other = tokenizer_ref({"file": tmp_path / "b" / "tokenizer.json", "sha256": one.sha256})
    inline = tokenizer_ref({"json": WORDS})
    bare = tokenizer_ref(one.config)
    assert one == other == inline == bare == tokenizer_ref(JSONTokenizer(WORDS))
    assert str(tmp_path) not in repr(one) + json.dumps(one.config)
    assert list(other.encode("a dog")) == [1, 4, 7, 2]
    with pytest.raises(EncodeError, match=one.sha256):
        bare.encode("a dog")
    assert tokenizer_ref({"json": json.loads(WORDS)}).encode("a dog") == [1, 4, 7, 2]


def test_the_built_in_one_is_at_hand_by_its_identity():
    """The byte tokenizer's identity is enough to encode with it; the name with another digest is not it."""
    ref = tokenizer_ref("bytes")
    assert tokenizer_ref(ref.config).encode("A") == [1, 68, 2]
    assert tokenizer_ref(ref) is ref
    assert tokenizer_ref({"name": "bytes", "sha256": "0" * 64}).tokenizer is None


def test_a_users_own_tokenizer_is_taken():
    """Anything of the right shape is a tokenizer."""

    class Letters:
        name, sha256, vocab_size, pad_id, num_start_ids, num_end_ids = "letters", "a" * 64, 27, None, 0, 0

        def encode(self, text):
            return [ord(letter) - 96 for letter in text]

    ref = tokenizer_ref(Letters())
    assert ref == TokenizerRef("letters", "a" * 64)
    assert ref.encode("abc") == [1, 2, 3]


@pytest.mark.parametrize(
    "setting",
    [
        "gpt2",
        5,
        [],
        {},
        {"name": "x"},
        {"file": "x", "json": "{}"},
        {"file": 5},
        {"json": 5},
        {"json": "{}"},
        {"json": "no json"},
        {"path": "x"},
        {"name": "x", "sha256": "abc"},
        {"name": "", "sha256": "0" * 64},
        {"name": "x", "sha256": "A" * 64},
        {"file": "no/such/file.json"},
        {"file": "\0"},
        {"json": WORDS, "sha256": "0" * 64},
        {"json": WORDS, "sha256": 5},
        JSONTokenizer,
    ],
)
def test_bad_settings_are_refused(setting):
    """A setting that names no tokenizer is a ConfigError."""
    with pytest.raises(ConfigError):
        tokenizer_ref(setting)


def test_a_file_that_is_none_is_refused_at_once(tmp_path):
    """A folder, a pipe without a writer, and bytes that are not text are errors, not waits."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "binary"):
        with pytest.raises(ConfigError):
            JSONTokenizer.from_file(path)


def test_a_missing_library_names_the_extra(monkeypatch):
    """Without the tokenizers library the error says which extra brings it, and an identity alone needs none."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"mm-assets\[text\]"):
        JSONTokenizer(WORDS)
    assert tokenizer_ref({"name": "x", "sha256": "0" * 64}).tokenizer is None


def test_identities_do_not_depend_on_the_process():
    """A JSON object's digest is the same in another process with another hash seed."""
    code = (
        "import json, sys; from mm_assets.media.tokenizers import tokenizer_ref;"
        "print(tokenizer_ref({'json': json.load(sys.stdin)}).sha256)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=WORDS,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
