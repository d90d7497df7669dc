"""Mechanism: actors' base, messages, the MLX thread, rows and KV, text, and the embedding facade."""
