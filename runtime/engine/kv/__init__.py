"""Rows and their KV: how many sequences share one forward pass."""
