"""The tiny engines of the engine's tests, and the folders of the runtime's."""

from tests.engine.conftest import layout_of, new_batch, new_engine, tiny_model
from tests.runtime.conftest import folder_of

__all__ = ["folder_of", "layout_of", "new_batch", "new_engine", "tiny_model"]
