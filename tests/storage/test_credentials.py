"""An S3 store without credentials."""

from pathlib import Path

import pytest

from mm_assets.errors import SourceError
from mm_assets.storage.store import Store
from mm_assets.storage.urls import filesystem, reason


def test_missing_credentials_say_where_to_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variables and the settings, without a request to any server."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/no/such/file")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = Store("s3://some-bucket/root", {"skip_instance_cache": True})
    with pytest.raises(SourceError, match=r"NoCredentialsError.*AWS_ACCESS_KEY_ID.*`storage_options`.*`root_options`"):
        store.sizes("")


def test_rotated_credentials_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of credentials that was written again, or other variables, are those of the next use of a file system."""
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def write(key: str) -> None:
        draft = tmp_path / "draft"
        draft.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")
        draft.replace(tmp_path / "credentials")

    def used() -> tuple[object, str]:
        """The client of the one file system of the URL, and the key that it signs with."""
        fs, _ = filesystem("s3://some-bucket/root", {"client_kwargs": {"region_name": "eu-west-1"}})
        return fs.s3, fs.s3._request_signer._credentials.access_key

    write("FIRST")
    client, key = used()
    assert key == "FIRST"
    assert used() == (client, "FIRST"), "nothing has changed"
    write("OTHER")
    assert used()[1] == "OTHER"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "THIRD")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert used()[1] == "THIRD"


@pytest.mark.parametrize("said", ["Forbidden", "Access Denied"])
def test_a_refusal_says_which_permissions_it_takes(said: str) -> None:
    """S3 gives no reason with these; the system's own refusal of a local file is not about S3."""
    assert "s3:GetObject" in reason(PermissionError(said))
    assert reason(PermissionError(13, "Permission denied")) == "Permission denied"
