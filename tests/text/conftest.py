"""One service of each tokenizer family, shared by the tests: they only read."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from mlx_troupe.runtime.text import TextService

from . import made_tokenizers


@contextmanager
def opened(load, **options):
    """A service that is closed at the end."""
    vocab_size = options.pop("vocab_size", None) or len(load())
    service = TextService(load, vocab_size=vocab_size, **options)
    try:
        yield service
    finally:
        service.close()


@pytest.fixture(scope="session")
def byte_level_service():
    with opened(made_tokenizers.byte_level, threads=1) as service:
        yield service


@pytest.fixture(scope="session")
def sentencepiece_service():
    with opened(made_tokenizers.sentencepiece, threads=1) as service:
        yield service


@pytest.fixture(scope="session")
def gemma_like_service():
    with opened(lambda: made_tokenizers.sentencepiece(strip=False), threads=1) as service:
        yield service


@pytest.fixture(scope="session")
def odd_service():
    with opened(made_tokenizers.odd, threads=1) as service:
        yield service


@pytest.fixture(scope="session")
def metaspace_service():
    with opened(made_tokenizers.metaspace, threads=1) as service:
        yield service
