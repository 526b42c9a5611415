"""Queries, keys and values from the input of an attention layer."""

from .api import HeadWeights, project_heads

__all__ = ["HeadWeights", "project_heads"]
