"""An S3 store without credentials."""

import pytest

from mm_assets.errors import SourceError
from mm_assets.storage.store import Store


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
