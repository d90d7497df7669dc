"""The models on this disk, for the command line: list, describe, remove, fetch. Imports no MLX."""

from .models.catalog import list_models, model_info, pull, remove_model

__all__ = ["list_models", "model_info", "pull", "remove_model"]
