import os
import subprocess
import sys

import pytest

# Helper modules beside the tests, wherever the tests run from.
sys.path.insert(0, os.path.dirname(__file__))


@pytest.fixture(scope="session")
def real_batch(tmp_path_factory):
    """Folder with a batch of SmolLM2's hidden states on two texts, and its head: loading the model is what takes long."""
    for package in ("transformers", "gguf"):
        pytest.importorskip(package)
    import command

    examples, out = command.ROOT / "examples", tmp_path_factory.mktemp("real")
    texts = [examples / "texts" / name for name in ("soup.txt", "tides.txt")]
    make = [sys.executable, examples / "make_batch.py", "--out", out, *texts]
    subprocess.run([*map(str, make)], check=True, timeout=600, stderr=subprocess.DEVNULL)
    return out
