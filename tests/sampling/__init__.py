"""Tests of the sampler: exact against mlx-lm where that is possible, statistical with fixed seeds where not."""
