"""schemathesis on what `/openapi.json` says: no answer is a server error, and every answer is as described."""

import asyncio
import importlib.util
import sys

import pytest

from mlx_troupe.api.server import listening
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.runtime import Runtime
from tests.models.tiny import build_tiny

from .serving import serving

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"
)


async def run(url: str, *options: str) -> None:
    """Run it in a process of its own; its report is shown when it finds something."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", "-m", "schemathesis.cli", "run", url + "/openapi.json", "--no-color"),
        *("--checks", CHECKS, "--request-timeout", "20", "--generation-database", "none", "--seed", "1"),
        *("--suppress-health-check", "all", "--no-shrink", "--continue-on-failure", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    print(said.decode()[-8000:])
    assert process.returncode == 0, said.decode()[-8000:]


async def test_a_few_requests_of_every_kind():
    async with serving() as client:
        await run(client.url, "--max-examples", "2", "--phases", "coverage,fuzzing", "--max-time", "4")


@pytest.mark.heavy
async def test_many_requests_with_a_real_model(tmp_path):
    async with (
        Runtime(model=str(build_tiny("llama", tmp_path)), max_context_tokens=256, max_tokens_default=8) as runtime,
        listening(runtime, ServerSettings(port=0, access_log=False)) as url,
    ):
        await run(url, "--max-examples", "300", "--phases", "coverage,fuzzing", "--max-time", "200")
