"""Declarations: what is wrong is refused with file, key and what is allowed."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from mm_assets.errors import ConfigError, SourceError
from mm_assets.pipeline.chain import RECORDED_STAGES
from mm_assets.pipeline.spec import NOT_DECISIVE, DatasetSpec
from mm_assets.rows.schema import MemberRules
from mm_assets.storage.files import SourceFile

GOOD: dict[str, Any] = {"name": "docs", "shards": "shards/*.tar", "root": "/data"}


def spec(**changes: Any) -> DatasetSpec:
    return DatasetSpec.from_config({**GOOD, **changes}, where="defs.yaml", base=Path("/project"))


def test_a_declaration_needs_three_settings() -> None:
    """Name, shards and root are enough; relative shards count from the declaration's folder."""
    made = spec()
    assert (made.name, made.shards, made.root) == ("docs", "/project/shards/*.tar", "/data")
    assert spec(shards="s3://bucket/x").shards == "s3://bucket/x"


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"shard": 1}, "shard", "is not a setting; allowed here: annotators, automation, batch_bytes"),
        ({"name": "a b"}, "name", "letters, digits and _"),
        ({"name": None}, "name", "expected text"),
        ({"shards": 3}, "shards", "int 3, expected text"),
        ({"settle_seconds": -1}, "settle_seconds", "at least 0"),
        ({"settle_seconds": True}, "settle_seconds", "expected a number"),
        ({"settle_seconds": float("nan")}, "settle_seconds", "at least 0"),
        ({"materialize": "later"}, "materialize", "allowed: read, write"),
        ({"on_materialize_error": "x"}, "on_materialize_error", "allowed: keep, drop_row, drop_sample, fail"),
        ({"on_damaged_shard": "x"}, "on_damaged_shard", "allowed: fail, salvage"),
        ({"parquet": {"compression": "lzma"}}, "parquet.compression", "allowed: zstd"),
        ({"parquet": {"row_group_bytes": 3}}, "parquet.row_group_bytes", "at least 65536"),
        ({"parquet": {"codec": 3}}, "parquet.codec", "allowed here: compression, row_group_bytes"),
        ({"samples": {"text_field": "x"}}, "samples.text_field", "is not a setting"),
        ({"samples": {"fields": ["a"], "user_columns": ["a"]}}, "samples.fields", "give one of them"),
        ({"samples": {"user_columns": ["a", "a"]}}, "samples.user_columns", "twice"),
        ({"samples": {"extensions": {".PNG": "image"}}}, "samples.extensions..PNG", "lower case"),
        ({"samples": {"extensions": {"png": "metadata"}}}, "samples.extensions.png", "row modality"),
        ({"samples": []}, "samples", "expected keys and values"),
        ({"partition_pattern": "("}, "partition_pattern", "not a regular expression"),
        ({"partition_pattern": "(a)(b)"}, "partition_pattern", "has 2 groups"),
        ({"owners": ["me"]}, "owners", "e-mail"),
        ({"filters": ["blur"]}, "filters[0]", "expected keys and values with a `type`"),
        ({"filters": [{"type": "blurr"}]}, "filters[0]", "blur"),
        ({"filters": [{"type": "aspect_ratio", "mim": 1}]}, "filters[0]", "min"),
        ({"annotators": [{"type": "nope"}]}, "annotators[0]", "nope"),
        ({"pack": "interleafed"}, "pack", "interleaved"),
        ({"pack": {"fields": [{"name": "x", "field": "ImagField", "modality": "image"}]}}, "pack", "ImageField"),
        ({"on_misaligned": "keep"}, "on_misaligned", "drop_sample"),
        ({"batch_bytes": 1}, "batch_bytes", "at least 65536"),
        ({"runs_per_tick": 0}, "runs_per_tick", "at least 1"),
    ],
)
def test_a_wrong_setting_is_refused(changes: dict[str, Any], key: str, says: str) -> None:
    """A wrong key or value gives file, key and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        spec(**changes)
    assert caught.value.where == "defs.yaml"
    assert caught.value.key.startswith(key)
    assert says in str(caught.value)


def test_all_wrong_settings_are_named() -> None:
    """Every wrong key of a declaration is in one error."""
    with pytest.raises(ConfigError) as caught:
        spec(shards=3, shard=1, samples={"texts_field": 3}, filters=[{"type": "blurr"}], batch_bytes=1)
    for key in ("shards: is int 3", "shard: is not", "samples.texts_field: is int 3", "filters[0].type", "batch_bytes"):
        assert key in str(caught.value)


@pytest.mark.parametrize("missing", ["name", "shards", "root"])
def test_a_missing_setting_is_named(missing: str) -> None:
    """A setting that has no default is asked for by name."""
    config = {key: value for key, value in GOOD.items() if key != missing}
    with pytest.raises(ConfigError, match=f"{missing}: is missing"):
        DatasetSpec.from_config(config, where="defs.yaml")


def test_a_tokenizer_s_file_is_next_to_its_declaration(tmp_path: Path) -> None:
    """A relative path of a tokenizer counts from the declaration's folder, as shards do; nothing else is touched."""
    field = {"name": "ids", "field": "TokensField", "config": {"tokenizer": {"file": "tok.json"}, "vocab_size": 9}}
    (tmp_path / "tok.json").write_text(
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}}'
    )
    made = DatasetSpec.from_config(GOOD | {"pack": {"fields": [field]}}, where="defs.yaml", base=tmp_path)
    assert made.pack["fields"][0]["config"]["tokenizer"] == {"file": str(tmp_path / "tok.json")}
    assert made.pack["fields"][0]["name"] == "ids"


EVERYTHING: dict[str, Any] = {
    "storage_options": {"anon": True}, "root_options": {"a": 1}, "partition_pattern": "(?P<partition>a)",
    "settle_seconds": 1, "description": "d", "owners": ["team:x"],
    "samples": {
        "sample_id_field": "url", "texts_field": "t", "images_field": "i", "image_member_field": "f",
        "user_columns": ["b", "a"], "per_image_fields": ["q"], "per_text_fields": ["z"],
        "extensions": {"pt": "array", "md": "text"}, "allow_references": True,
        "allowed_references": ["https://x.org/"], "max_text_bytes": 1000,
    },
    "materialize": "write", "on_materialize_error": "fail", "on_damaged_shard": "salvage", "max_content_bytes": 7,
    "annotators": [{"type": "image_size"}],
    "filters": [
        {"type": "aspect_ratio", "min": 0.5, "max": 2},
        {"type": "exact_duplicates", "name": "dups", "after_content": True},
    ],
    "on_empty_sample": "keep", "renumber": True, "parquet": {"compression": "none", "row_group_bytes": 65536},
    "pack": {"preset": "interleaved", "fields": [{"name": "x", "field": "ImageField", "modality": "image"}]},
    "on_misaligned": "fail", "batch_bytes": 65536, "runs_per_tick": 3, "cron": "* * * * *", "poll_seconds": 9,
    "run_sensor": True, "run_schedule": True, "keep_manifests": 9,
}  # fmt: skip


def test_digests_stay_as_they_are() -> None:
    """A release that changes the digest of a declaration makes every partition of its dataset pending."""
    digests = [stage.digest(spec(**EVERYTHING))[:16] for stage in RECORDED_STAGES]
    assert digests == [
        "6d0b8c8b2817dbee",
        "213a9b2c51c52d60",
        "c8db490246d8506b",
        "4912163283b33b80",
        "a2343b41b812ee09",
        "d32777dedea4805f",
    ]


def test_a_key_without_a_value_takes_its_default() -> None:
    """What YAML reads as null is a default, in nested settings too; a root without a value is an error."""
    empty = {key: None for key in DatasetSpec.model_fields if key not in GOOD}
    assert spec(**empty) == spec()
    assert spec(samples={"texts_field": None, "user_columns": None}) == spec()
    with pytest.raises(ConfigError, match="root: is empty: is the environment variable"):
        spec(root=None)


def test_a_spec_is_immutable_and_crosses_processes() -> None:
    """A spec cannot be changed, and pickles with the file that it comes from."""
    made = spec(**EVERYTHING)
    with pytest.raises(ValueError, match="frozen"):
        made.name = "other"  # type: ignore[misc]  # what is tested
    restored = pickle.loads(pickle.dumps(made))
    assert restored == made
    assert restored.where == "defs.yaml"


def test_replace_checks_what_it_changes() -> None:
    """A copy with other settings is checked as a declaration is, and its messages name the same file."""
    made = spec(**EVERYTHING)
    assert made.replace(root="/other").root == "/other"
    assert made.replace(root="/other").replace(root=made.root) == made
    with pytest.raises(ConfigError, match=r"defs.yaml: materialize: is 'later', allowed: read, write"):
        made.replace(materialize="later")
    with pytest.raises(ConfigError, match="no_such: is not a setting"):
        made.replace(no_such=1)


@pytest.mark.parametrize("key", ["shards", "root"])
@pytest.mark.parametrize("url", ["simplecache::s3://bucket/*.tar", "zip://*.tar::file:///data/all.zip"])
def test_a_chained_url_is_refused_by_name(tmp_path: Path, key: str, url: str) -> None:
    """Shards and root that are chained URLs of fsspec are refused under their key, with what to do."""
    config = {"name": "d", "shards": str(tmp_path), "root": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"chained URL.*name the file without simplecache::") as caught:
        DatasetSpec.from_config({**config, key: url}, where="defs.yaml")
    assert caught.value.key == key
    with pytest.raises(SourceError, match="chained URL"):
        SourceFile(url)


NEUTRAL = {"allow_references", "allowed_references", "pdf_dpi"}  # of `samples`: a person has classified each setting
DECISIVE: dict[str, Any] = {
    "pdf": "document",
    "sample_id_field": "url",
    "texts_field": "t",
    "images_field": "i",
    "image_member_field": "f",
    "user_columns": ["a"],
    "per_image_fields": ["q"],
    "per_text_fields": ["z"],
    "extensions": {"pt": "array"},
    "encoding": "cp932",
    "max_text_bytes": 1000,
    "roles": ["rgb"],
}


def test_every_setting_of_samples_is_classified() -> None:
    """A new setting of `samples` decides the schema unless it is listed as one that does not, and is added here."""
    assert set(MemberRules.model_fields) == NEUTRAL | DECISIVE.keys()
    assert set(spec().declared["samples"]) == DECISIVE.keys()
    assert NOT_DECISIVE == NEUTRAL
    for name, value in DECISIVE.items():
        assert spec(samples={name: value}).declared["samples"][name] == value
