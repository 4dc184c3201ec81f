"""The candidates, by name, in the order of the tables; each in a module that is imported where it is needed."""

from __future__ import annotations

import importlib
from pathlib import Path

from benchmarks.loading.adapters.base import Adapter

LIMIT_PREFIX = "limit-"

CANDIDATES: dict[str, str] = {
    "mult": "packed:Mult",
    "mstr": "packed:Mstr",
    "ffcv": "ffcv_beton:FfcvLoader",
    "ffcv-tables": "ffcv_beton:FfcvTables",
    "mosaicml-streaming": "mosaicml_mds:MosaicML",
    "litdata": "litdata_chunks:LitData",
    "webdataset": "webdataset_tar:WebDataset",
    "lance": "lance_table:Lance",
    "lmdb": "lmdb_tables:Lmdb",
    "arrow-take": "arrow_ipc:ArrowTake",
    "arrow-buffers": "arrow_ipc:ArrowBuffers",
    "spdl": "spdl_pipeline:Spdl",
    "hf-datasets": "hf_datasets:HfDatasets",
    "limit-rows": "limits:RowBlob",
    "limit-columns": "limits:ColumnBlob",
    "limit-advised": "limits:Advised",
    "limit-libjpeg-turbo": "limits:LibjpegTurbo",
}


def make_adapter(name: str, folder: Path) -> Adapter:
    """The candidate of that name, on the files in `folder`.

    Raises:
        KeyError: no such candidate.
        ModuleNotFoundError: a package that it needs is not installed.
    """
    module, _, attribute = CANDIDATES[name].partition(":")
    adapter_class: type[Adapter] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return adapter_class(folder)
