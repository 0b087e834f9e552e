"""Documents that tell the truth: examples that run, links that lead somewhere."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def block(language):
    (code,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return code


def test_cpp_example_is_the_compiled_one():
    assert block("cpp") == (ROOT / "examples" / "score_tokens.cc").read_text()


def test_python_example_runs():
    pytest.importorskip("lmhead")
    done = subprocess.run([sys.executable, "-c", block("python")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([6, 64]) torch.Size([1000, 64])" in done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name if path.parent == ROOT else f"docs/{path.name}")
def test_links(document):
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        assert "://" in link or (document.parent / link).exists(), link


def test_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
