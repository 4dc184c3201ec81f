"""Packed samples as files of other projects' formats: one module per format, one line in `EXPORTS`.

Payloads are copied, not encoded again. Knows datasets and how the formats are read again, and nothing of the pipeline.
"""

from mm_assets.exports.export import EXPORTS, ExportProgress, ExportSummary, export

__all__ = ["EXPORTS", "ExportProgress", "ExportSummary", "export"]
