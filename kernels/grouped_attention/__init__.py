"""Attention of groups of queries to few keys each, and sequences in blocks."""

from .api import Part, combine, grouped_attention, one_group
from .blocks import blocks_of, tag_blocks_of, tokens_of, with_neighbours

__all__ = ["Part", "blocks_of", "combine", "grouped_attention", "one_group", "tag_blocks_of", "tokens_of",
           "with_neighbours"]
