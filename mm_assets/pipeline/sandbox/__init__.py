"""SQL of people who are not trusted, over a dataset's tables: each query in a process of its own, with limits."""

from mm_assets.pipeline.sandbox.queries import QueryError, QueryResult, Relation, Sandbox, dataset_sandbox

__all__ = ["QueryError", "QueryResult", "Relation", "Sandbox", "dataset_sandbox"]
