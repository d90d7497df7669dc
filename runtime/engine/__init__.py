"""The MLX side: everything that runs on an engine's own thread."""
