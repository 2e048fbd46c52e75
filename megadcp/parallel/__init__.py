"""Parallel layers: one idea per file."""
