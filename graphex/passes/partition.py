"""Deprecated name of `graphex.rewrite.partition`, kept for this milestone."""

from graphex.rewrite.partition import Partitioner

__all__ = ["Partitioner"]
