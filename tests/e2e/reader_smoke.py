"""What an environment with only the reader's wheel can do; run by its interpreter, see `test_wheels.py`.

Arguments: manifests of packed datasets with images. Prints one JSON object.
"""

import json
import sys
import sysconfig
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import mm_assets

seen = {}
for manifest in sys.argv[1:]:
    with mm_assets.open(manifest) as samples:
        fields = {name: type(field).__name__ for name, field in samples.fields.items()}
        rules = {name: {"type": "list"} for name in fields}
        if fields["image"] == "ImageField":  # pixels of one size, without OpenCV
            samples = samples.with_settings({"image": {"decode_size": [64, 48], "channels": 3}})
            rules["image"] = {"type": "stack"}
        loader = mm_assets.MultimodalLoader(
            samples, batch_size=4, shuffle=True, num_workers=2, seed=1, collator=mm_assets.MultimodalCollator(rules)
        )
        batches = list(loader)
        seen[manifest] = {
            "fields": fields,
            "samples": sum(len(batch["index"]) for batch in batches),
            "shape": list(batches[0]["image"].shape) if fields["image"] == "ImageField" else None,
        }

site = Path(sysconfig.get_path("purelib"))
print(
    json.dumps(
        {
            "package": mm_assets.__file__,
            "site": str(site),
            "distributions": sorted(f"{found.name} {found.version}" for found in distributions()),
            "megabytes": sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) / 1e6,
            "absent": [name for name in ("dagster", "duckdb", "pyarrow", "cv2", "soundfile") if not find_spec(name)],
            "seen": seen,
        }
    )
)
