"""BLAS first: MLX takes the one that is loaded before it, and some test module imports MLX soon."""

from mlx_troupe.runtime.models.blas import load_blas

load_blas()
