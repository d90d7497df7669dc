"""Why a model cannot be used; every text says what to do about it."""

from __future__ import annotations

from ..errors import TroupeError


class ModelError(TroupeError):
    """Base of everything that goes wrong between a model's name and its loaded weights."""

    code = "model_error"


class ModelNotFound(ModelError):
    """No folder, file, cached model or hub repository has this name."""

    code = "model_not_found"


class UnsupportedModel(ModelError):
    """The model is sound, but its architecture, tokenizer or block type is not supported."""

    code = "model_unsupported"


class UnsafeModel(ModelError):
    """The folder asks to run code of its own; it is refused."""

    code = "model_unsafe"


class InvalidModel(ModelError):
    """The files are damaged, contradict each other or are hostile."""

    code = "model_invalid"


class ModelDownloadFailed(ModelError):
    """A hub or package index did not deliver the files."""

    code = "model_download_failed"
