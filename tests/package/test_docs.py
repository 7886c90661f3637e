"""The documentation is right: the Python in README.md and docs/ runs, without a network, and links and paths exist.

A page is one program: its blocks share a namespace and a directory, which is empty at first. Comments that do not
render, on the lines before a block, say what it needs:

    <!-- small: steps = 3; size = 64 -->    smaller values, for a quick run; test-all runs the block as it stands
    <!-- needs: cuda onnx -->               a GPU, or packages; without them the page is skipped from here on
    <!-- fragment: why -->                  the block does not run

Excerpts assume that their reader has, say, a model or a batch: GIVEN defines these.
"""

import importlib.util
import inspect
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from small_models import minilm

import fastbert.cli

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^(?P<marks>(?:<!-- [^\n]* -->\n)*)```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (small|needs|fragment): (.+) -->")

# Code to run before a block, by the page and the block's beginning.
GIVEN = {
    ("docs/cuda_on_cpu.md", "import sys"): """
import pytest, torch
if torch.cuda.is_available():
    pytest.skip("the kernels run on this machine's GPU")
""",
}


class Block(NamedTuple):
    line: int  # number of its first line of code in the page
    code: str
    marks: dict[str, str]

    def smaller(self) -> str:
        """The code with the values of `small`: each replaces the value in the one line that assigns that name."""
        code = self.code
        for assignment in self.marks["small"].split("; "):
            name = re.escape(assignment.split(" = ")[0])
            code, count = re.subn(rf"^{name} = [^#\n]*[^#\s]", assignment, code, flags=re.MULTILINE)
            assert count == 1, f"line {self.line}: {count} lines of the block begin with `{name} = `; expected one"
        return code


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, at.start("code")) + 1, at["code"], dict(MARK.findall(at["marks"])))
        for at in BLOCK.finditer(text)
    ]


PAGES = {
    str(page.relative_to(ROOT)): blocks(page) for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
RUNNABLE = [name for name, found in PAGES.items() if any("fragment" not in block.marks for block in found)]
SMALL = [name for name in RUNNABLE if any("small" in block.marks for block in PAGES[name])]


def require(needs: str) -> None:
    for need in needs.split():
        there = torch.cuda.is_available() if need == "cuda" else importlib.util.find_spec(need)
        if not there:
            pytest.skip(f"no {need}")


def givens(name: str, code: str) -> list[str]:
    return [given for (page, beginning), given in GIVEN.items() if page == name and code.startswith(beginning)]


def run(name: str, small: bool) -> None:
    namespace = {"__name__": "__main__"}
    for line, code, marks in PAGES[name]:
        if "fragment" in marks:
            continue
        require(marks.get("needs", ""))
        if "minilm()" in code:
            minilm()  # skips where it is not installed
        for given in givens(name, code):
            exec(given, namespace)
        if small and "small" in marks:
            code = Block(line, code, marks).smaller()
        # With an empty line for each line of the page before it, so that tracebacks show the page's line numbers.
        exec(compile("\n" * (line - 1) + code, str(ROOT / name), "exec"), namespace)


@pytest.fixture
def as_people_run_it(tmp_path, monkeypatch):
    """Sets up an empty directory, no network, and memory that is not filled."""
    connect = socket.socket.connect

    def local(self, address):
        is_here = self.family == socket.AF_UNIX or address[0] == "127.0.0.1"
        assert is_here, f"a block of the page connects to {address}; expected no network"
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    torch.use_deterministic_algorithms(False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # at this size, threads mostly wait for each other
    yield
    torch.set_num_threads(threads)


# Slow pages, which export, prepare and train. Tests of models and of training do that too.
SLOW_PAGES = "data export inference training"
TASKS = "classification distillation electra embeddings multi_vector pretraining question_answering sentence_encoders"
SLOW = {f"docs/{name}.md" for name in SLOW_PAGES.split()}
SLOW |= {f"docs/tasks/{name}.md" for name in f"{TASKS} serving tagging".split()}


@pytest.mark.filterwarnings("ignore:.*initialised anew, to be trained:UserWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in RUNNABLE])
def test_page_runs(as_people_run_it, name):
    run(name, small=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_page_runs_as_it_stands(as_people_run_it, name):
    run(name, small=False)


@pytest.mark.parametrize("name", PAGES)
def test_every_block_is_found(name):
    """A fence or comment in a form that BLOCK or MARK does not match would silently leave a block out."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(re.findall(r"^ *(?:```+|~~~+) *(?:python|py)\b", text, re.MULTILINE | re.IGNORECASE)) == len(PAGES[name])
    marks = sum(len(block.marks) for block in PAGES[name])
    assert len(re.findall(r"<!--\s*(?:small|needs|fragment)\b", text)) == marks


@pytest.mark.parametrize(("name", "beginning"), GIVEN)
def test_what_is_given_is_given_to_one_block(name, beginning):
    assert sum(block.code.startswith(beginning) for block in PAGES[name]) == 1


# ---- README


def test_readme_is_the_first_minute():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.slow  # importing everything in a new process; the blocks run in test_page_runs
def test_readme_runs_as_pasted(tmp_path):
    """Its blocks run one after the other, in a new interpreter and an empty directory, without anything from GIVEN."""
    pytest.importorskip("transformers")
    code = "\n".join(block.code for block in PAGES["README.md"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "forwards packed: 1, fallen back: 0" in done.stdout and "backends" in done.stdout


# Where the rows of README's first table are in docs/performance.md: the cases, and the contender.
MEASURED = (
    (("classifier base, 12 layers, forward, 8 × 128, half",), "HF SDPA"),
    (("classifier base, 12 layers, forward+backward, dropout 0.1, 8 × 128, half",), "HF SDPA"),
    (("masked LM base, 12 layers, step with AdamW, dropout 0.1, 8 × 128, half",), "HF SDPA"),
    (
        (
            "classifier base, 12 layers, forward, 8 × 128, full",
            "classifier base, 12 layers, forward+backward, dropout 0.1, 8 × 128, full",
        ),
        "HF SDPA",
    ),
    (("model base, 12 layers, forward, 1 × 128, full",), "OpenVINO"),
)


def test_readmes_speeds_are_the_measured_ones():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    told = readme.partition("| float32 | bfloat16 |\n")[2].partition("\n\n")[0].splitlines()[1:]
    for row, (cases, contender) in zip(told, MEASURED, strict=True):
        for cell, dtype in zip(row.strip("| ").split("|")[2:], ("float32", "bfloat16"), strict=True):
            numbers = re.findall(r"\d+\.\d+", re.sub(r"\(.*\)", "", cell))
            for number, case in zip(numbers, cases, strict=True):
                assert number in measured(case, dtype, contender), (case, dtype)
                assert (float(number) < 1) == (": slower" in cell)


def measured(case: str, dtype: str, contender: str) -> list[str]:
    """The numbers in docs/performance.md for a case, dtype and contender, one from every run that measured it."""
    lines = (ROOT / "docs/performance.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
    found = [i for i, row in enumerate(rows) if row[:2] == [case, dtype]]
    heads = [next(row for row in reversed(rows[:at]) if row[0] == "case") for at in found]
    return [rows[at][head.index(contender)] for at, head in zip(found, heads, strict=True) if contender in head]


# ---- links and paths

LINKING = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
REPORTS = {"cuda_report.md", "triton_report.md"}  # tables of compiler output, without paths to check


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", [p for p in LINKING if p.name not in REPORTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_exist(page):
    """Files that a page names by their path in the repository exist; <op> and * stand for any name."""
    rooms = r"(?:fastbert|csrc|tests|benchmarks|examples|docs)"
    for path in re.findall(rf"`({rooms}/[^`\s:]+)(?:::[^`]*)?`", prose(page)):
        pattern = re.sub(r"<\w+>", "*", path)
        for choice in alternatives(pattern):
            assert any(ROOT.glob(choice)), f"{path}: no such file"


def alternatives(pattern: str) -> list[str]:
    """Expands braces: a/{b,c}.md gives a/b.md and a/c.md."""
    found = re.search(r"\{([^}]*)\}", pattern)
    if not found:
        return [pattern]
    return [pattern.replace(found[0], choice, 1) for choice in found[1].split(",")]


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in pages if page.name != "index.md" and f"]({page})" not in index] == []


def test_every_command_is_on_its_page():
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    (commands,) = (action for action in fastbert.cli._parser()._actions if action.choices and not action.option_strings)
    assert [name for name in commands.choices if f"fastbert {name} " not in text] == []


# ---- the site

PUBLIC = (
    "", "ops", "hf", "data", "training", "metrics", "inference", "inference.export", "serving", "testing", "random",
)  # fmt: skip


def public_names(module) -> dict[str, object]:
    """What `from module import *` imports, except modules: its __all__, or callables it defines without underscore."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if name[0] != "_" and getattr(value, "__module__", None) == module.__name__ and callable(value)
    ]
    found = {name: getattr(module, name) for name in names if name[0] != "_"}
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}


def in_the_reference() -> dict[str, object]:
    """The names in docs/api (the heading, if one is given) and the objects that they stand for."""
    text = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    names = re.findall(r"^::: (\S+)(?:\n    options:\n      heading: (\S+))?", text, re.MULTILINE)
    return {heading or name: located(heading or name) for name, heading in names}


def located(name: str) -> object:
    """The object that a dotted name stands for, or None if there is none."""
    package, *parts = name.split(".")
    found = importlib.import_module(package)
    for part in parts:
        if inspect.ismodule(found) and not hasattr(found, part):
            if not importlib.util.find_spec(f"{found.__name__}.{part}"):
                return None
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part, None)
    return found


@pytest.mark.parametrize("place", PUBLIC)
def test_every_public_name_is_in_the_api_reference(place):
    module = importlib.import_module(f"fastbert.{place}".rstrip("."))
    there = {id(value) for value in in_the_reference().values()}
    assert [name for name, value in public_names(module).items() if callable(value) and id(value) not in there] == []


def test_the_api_reference_has_no_unknown_name():
    assert [name for name, value in in_the_reference().items() if value is None] == []


def make_site(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Builds the site into a folder as `make docs` does. (Not --quiet: it hides warnings from --strict.)"""
    for need in ("mkdocs", "mkdocstrings", "material"):
        pytest.importorskip(need)
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_the_site_is_made(tmp_path):
    done = make_site(tmp_path)
    assert done.returncode == 0, done.stderr
    html = "".join(page.read_text(encoding="utf-8") for page in (tmp_path / "api").rglob("index.html"))
    assert [name for name in in_the_reference() if not re.search(rf">\s*{re.escape(name)}\s*<", html)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["[a page](nowhere.md)", "[a file](../nowhere.py)", "[a part](#nowhere)", "::: fastbert.nowhere"]
)
def test_a_page_with_a_fault_fails(tmp_path, fault):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n{fault}\n")
    config = f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: docs\nhooks: [{ROOT}/docs/hooks.py]\nnav: [index.md]\n"
    (tmp_path / "mkdocs.yml").write_text(config)
    done = make_site(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0 and "nowhere" in done.stderr
