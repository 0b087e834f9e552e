"""Documents that tell the truth: examples that run, links that lead somewhere, options that programs have."""

import pathlib
import re
import subprocess
import sys

import command
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


def anchors(document):
    """Fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name if path.parent == ROOT else f"docs/{path.name}")
def test_fragments(document):
    for link, fragment in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
        target = document.parent / link if link else document
        assert fragment in anchors(target), f"{link}#{fragment}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name if path.parent == ROOT else f"docs/{path.name}")
def test_named_files(document):
    """A path in a folder of this repository that a page names is there."""
    folders = "benchmarks|cmake|docs|examples|include|python|scripts|shapes|src|tests|tools"
    for path in re.findall(rf"(?<![\w/.])((?:{folders})/[\w./-]*\.\w+)", document.read_text()):
        assert (ROOT / path).exists(), path


def test_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def options_of(program):
    """What says which options a program has: its help, or its source."""
    if program.startswith("lmhead "):
        return command.run(program.split()[1], "--help").stdout
    return (ROOT / (program if program.endswith(".py") else f"benchmarks/{program}.cc")).read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name if path.parent == ROOT else f"docs/{path.name}")
def test_options_of_commands(document):
    """Every option that a page gives to a program of this repository is one of its."""
    program = r"lmhead (?:score|verify|bench|pack|tune|info)|(?:benchmarks|examples)/[\w/]+\.py|gpu_bench|local_ranks"
    # A command ends with its backquote, a comment, a blank line or the next line of an indented block.
    for name, rest in re.findall(rf"(?<!\w)({program})\b([^`#]*?)(?=`|#|\n\n|\n {{4}}\S|\Z)", document.read_text()):
        for option in re.findall(r"(?<!\S)\[?(--[a-z][\w-]*)", rest):
            known = rf'{option}(?![\w-])|"{option[2:]}"'  # the latter where a loop adds the dashes
            assert re.search(known, options_of(name)), f"{name} {option}"


def numbers(row):
    """Of a table's row, behind its first cell."""
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", row.split("|", 2)[2])]


def test_figures_are_those_of_the_records():
    """Every row that plots.py --figures makes of the records is in the page that quotes it."""
    plots = [sys.executable, ROOT / "benchmarks" / "plots.py", "--figures"]
    made = subprocess.run(plots, capture_output=True, text=True, check=True).stdout.splitlines()
    pages = [(ROOT / "docs" / page).read_text().splitlines() for page in ("performance.md", "tuning.md")]
    quoted = [numbers(row) for page in pages for row in page if row.startswith("|")]
    rows = [row for row in made if row.startswith("|")]
    assert len(rows) == 13
    for row in rows:
        assert numbers(row) in quoted, row


@pytest.mark.parametrize(("host", "path"), [
    ("skyrl", "skyrl/backends/skyrl_train/workers/megatron/megatron_model_wrapper.py"),
    ("verl", "verl/models/mcore/model_forward_fused.py"),
])  # fmt: skip
def test_changes_to_a_trainer_fit_its_source(host, path):
    """Every line that a diff of docs/integrations.md keeps or takes away is in the host's file, in that order."""
    hosts = pytest.importorskip("hosts")
    source = (hosts._installed(host) / path).read_text().splitlines()
    section = re.search(rf"\n## {host}.*?(?=\n## )", (ROOT / "docs" / "integrations.md").read_text(), re.S | re.I)[0]
    (diff,) = re.findall(r"```diff\n(.*?)```", section, re.S)
    at = 0
    for line in diff.splitlines():
        want = line[1:].replace("...)", "")
        if line[:1] in " -" and want.strip() not in ("...", "..", ""):
            at = next((i + 1 for i in range(at, len(source)) if source[i].startswith(want)), None)
            assert at is not None, f"{path} has no further line {want!r}"
