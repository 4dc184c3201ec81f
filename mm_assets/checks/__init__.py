"""Checks: SQL statements that select violations, run by DuckDB over the files of one partition."""

from mm_assets.checks.catalog import CATALOG
from mm_assets.checks.context import CheckContext, Outcome
from mm_assets.checks.runner import run_checks

__all__ = ["CATALOG", "CheckContext", "Outcome", "run_checks"]
