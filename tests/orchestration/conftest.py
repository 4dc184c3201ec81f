"""Fixtures: a Dagster instance."""

from ..e2e.databases import instance as instance
from ..e2e.databases import new_databases as new_databases
