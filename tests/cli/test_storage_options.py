"""`--storage-options` and `--set` of the commands that read, and secrets, which are never printed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner, Result
from fsspec.implementations.memory import MemoryFileSystem

from mm_assets.cli.main import main
from mm_assets.cli.secrets import is_secret, masked_options
from mm_assets.pipeline.load import engine_choice
from mm_assets.pipeline.load.processes import Processes

from ..pipeline.chain import declare, run_chain
from ..pipeline.shards import CAPTIONS, make_shard

SECRET = "wJalrXUtnFEMI/K7MDENG"
OPTIONS = ("--storage-options", f"secret={SECRET}", "--storage-options", '{"region": "eu"}')


class GuardedFileSystem(MemoryFileSystem):
    """Files in memory behind a secret."""

    protocol = "guarded"
    store: dict[str, object] = {}
    pseudo_dirs = [""]
    cachable = False

    def __init__(self, secret: str | None = None, region: str | None = None, **options: object) -> None:
        super().__init__(**options)
        if (secret, region) != (SECRET, "eu"):
            raise PermissionError("the secret is wrong")


@pytest.fixture
def guarded(tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A dataset of one partition at guarded://root, whose shards are at guarded://in."""
    fsspec.register_implementation("guarded", GuardedFileSystem, clobber=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    # Files in memory are those of this process.
    monkeypatch.setattr(engine_choice, "Processes", lambda _, **options: Processes(0, **options))
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)
    fs = GuardedFileSystem(SECRET, "eu")
    fs.put(str(tmp_path / "in"), "guarded://in", recursive=True)
    yield
    GuardedFileSystem.store.clear()
    GuardedFileSystem.pseudo_dirs[:] = [""]


def mm(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, (result.output, result.exception)
    assert SECRET not in result.output
    return result


@pytest.mark.usefixtures("guarded")
def test_options_reach_shards_and_root(tmp_path: Path) -> None:
    """A dataset behind options is planned, packed, read and asked for with them, and no output has the secret."""
    place = ("-d", "web", "--root", "guarded://root")
    shards = ("--shards", "guarded://in")
    planned = mm("plan", *place, *shards, *OPTIONS).stdout.splitlines()[-1]
    assert planned.endswith("--storage-options region=eu --dataset web`"), "the secret is left to the environment"
    mm("run", *place, *shards, *OPTIONS, "-v")
    assert "1 published, 0 pending" in mm("status", *place, *shards, *OPTIONS).stdout
    assert "data: " not in mm("losses", *place, *OPTIONS).stdout
    assert json.loads(mm("sql", *place, *OPTIONS, "--json", "select 1 as n").stdout)["datasets"]["web"]["rows"] == [[1]]
    assert "web: 4 samples in 1 partition" in mm("stats", *place, *OPTIONS).stdout
    manifest = "guarded://root/web/manifest.json"
    assert "4 samples" in mm("inspect", manifest, *OPTIONS).stdout
    assert mm("verify", manifest, *OPTIONS).stdout.count(": ok") == 3
    for options in ((), ("--json",)):
        refused = mm("inspect", f"guarded://root/{SECRET}/none.mult", *OPTIONS, *options, code=1)
        assert "guarded://root/***/none.mult" in refused.stderr


@pytest.mark.usefixtures("guarded")
def test_a_declaration_has_no_secret(tmp_path: Path) -> None:
    """`init` writes variables of the environment in the place of secrets, and says which to set."""
    said = mm("init", "guarded://in", "-d", "web", *OPTIONS, "--project").stdout
    text = (tmp_path / "packed_datasets" / "defs" / "web" / "defs.yaml").read_text()
    assert SECRET not in text
    assert "storage_options: {region: eu, secret: '{{ env.WEB_STORAGE_OPTIONS_SECRET }}'}" in text
    assert "set the environment variable WEB_STORAGE_OPTIONS_SECRET" in said


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--storage-options", "{secret"), "--storage-options: is not JSON"),
        (("--storage-options", f'{{"secret": "{SECRET}"'), "--storage-options: is not JSON"),
        (("--storage-options", f"a.secret={SECRET}: ["), "a.secret: found ***, expected YAML"),
        (("--storage-options", "anon"), "--storage-options: found a text without =, expected KEY=VALUE"),
        (("--storage-options", "anon=true"), "--storage-options: are of no use: the shards and the root of "),
        (("--set", f"root_options.secret={SECRET}", "--set", "pack=nothing"), "pack"),
    ],
)
def test_wrong_options_are_named_without_their_values(
    tmp_path: Path, dagster_home: Path, given: tuple[str, ...], says: str
) -> None:
    """An error of an option has its name, and not the text, which may hold a secret."""
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)
    assert says in mm("plan", str(tmp_path / "in"), *given, code=2).stderr


def test_settings_of_commands_that_read(tmp_path: Path, dagster_home: Path) -> None:
    """`inspect --set` decodes with other settings, and a dataset that options name takes `--set` without shards."""
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)
    run_chain(declare(tmp_path / "root", tmp_path / "in"))
    manifest = str(tmp_path / "root" / "data" / "manifest.json")
    shown = mm("inspect", manifest, "-s", "0", "--set", "image.decode_size=[4, 6]").stdout
    assert "decode_size=(4, 6)" in shown
    assert "expected MODALITY.KEY=VALUE" in mm("inspect", manifest, "--set", "image=1", code=2).stderr
    place = ("--root", str(tmp_path / "root"), "-d", "data")
    former = tmp_path / "root" / "data" / "manifests" / f"{'0' * 64}.json"
    shutil.copy(manifest, former)
    os.utime(former, (0, 0))  # a newer one may be about to be published
    assert "nothing to remove" in mm("clean", *place, "--set", "keep_manifests=9").stdout
    assert "would remove 1 file" in mm("clean", *place, "--set", "keep_manifests=1", "--dry-run").stdout
    assert "keep_manifest: is not a setting" in mm("clean", *place, "--set", "keep_manifest=1", code=2).stderr


def test_names_of_secrets() -> None:
    """Options that hold secrets are known by their names, in whatever nesting."""
    assert all(map(is_secret, ("secret", "account_key", "SAS_TOKEN", "Authorization", "password")))
    assert not any(map(is_secret, ("anon", "endpoint_url", "region", "profile")))
    given = {"key": "a", "client_kwargs": {"region": "b", "aws_secret_access_key": "c"}}
    assert masked_options(given) == {"key": "***", "client_kwargs": {"region": "b", "aws_secret_access_key": "***"}}


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_secrets_of_a_url_are_masked(dagster_home: Path, flags: tuple[str, ...]) -> None:
    """A URL in an error has no password, and a presigned one is without what signs it, in text and in JSON."""
    url = f"http://user:{SECRET.replace('/', '')}@127.0.0.1:9/x.tar?X-Amz-Signature=5ec2e7&versionId=1"
    result = mm("run", "--shards", url, *flags, code=1)
    assert "http://user:***@127.0.0.1:9/x.tar?versionId=1: cannot be " in result.output
    assert "5ec2e7" not in result.output
