"""The Python in the documentation runs: every block of README.md and docs/, without a network.

A page is one program: its blocks share a namespace and a directory, which is empty at first. Comments that do not
render, on the lines before a block, say what it needs:

    <!-- small: steps = 3; size = 64 -->    values for its own, with which it is quick; test-all runs it as it stands
    <!-- needs: cuda onnx -->               a GPU, or packages; the page is skipped from there on where they are missing
    <!-- fragment: why -->                  the block does not run

Excerpts begin with what their reader has already, a model or a batch: that is in GIVEN.
"""

import importlib.util
import re
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from models import minilm

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^(?P<marks>(?:<!-- .* -->\n)*)```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (small|needs|fragment): (.+) -->")

# By page and the beginning of a block: what comes before it.
GIVEN = {
    ("README.md", "import torch\nfrom fastbert import BertConfig"): """
import torch
from fastbert import BertModel
from models import TINY, batch
BertModel(TINY).save_pretrained("path/to/bert")
input_ids, token_type_ids, attention_mask = (tensor.cpu() for tensor in batch([5, 9, 2], 9).values())
ids, cu_seqlens = torch.arange(11), torch.tensor([0, 4, 11], dtype=torch.int32)
""",
    ("README.md", "from fastbert import BertForMaskedLM\nfrom fastbert.data"): """
from fastbert import BertForMaskedLM
from models import TINY, minilm
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(minilm())
dataset = [{"input_ids": tokenizer(text).input_ids} for text in ("One text.", "Another text, a longer one.")]
lengths = [len(example["input_ids"]) for example in dataset]
model = BertForMaskedLM(TINY.changed(vocab_size=len(tokenizer)))
""",
    ("README.md", "report = fastbert.accelerate(model)"): """
import fastbert
from models import hugging_face
model = hugging_face()
""",
    ("docs/accelerate.md", "report = fastbert.accelerate(model)"): """
import fastbert
from models import hugging_face
model = hugging_face()
""",
    ("docs/cuda_on_cpu.md", "import sys"): """
import pytest, torch
if torch.cuda.is_available():
    pytest.skip("the kernels run on this machine's GPU")
""",
    ("docs/graph.md", "graphed = fastbert.graph(model"): """
import pytest, torch
import fastbert
from models import TINY, batch
if not torch.cuda.is_available():
    pytest.skip("no GPU")
model = fastbert.BertModel(TINY).cuda().eval()
input_ids, _, attention_mask = batch([5, 9, 2], 9).values()
ids, ends = torch.arange(40), torch.tensor([0, 11, 40], dtype=torch.int32)
""",
    ("docs/heads.md", "class PackedTrainer(Trainer)"): """
from torch.utils.data import DataLoader
from transformers import Trainer
from fastbert.data import TokenBudgetSampler
""",
}


class Block(NamedTuple):
    line: int  # of its first line of code, in the page
    code: str
    marks: dict[str, str]

    def smaller(self) -> str:
        """The code with the values of its `small`, each the value of one line that assigns the name."""
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
        # After as many empty lines as there are lines before it in the page, so that tracebacks point there.
        exec(compile("\n" * (line - 1) + code, str(ROOT / name), "exec"), namespace)


@pytest.fixture
def as_people_run_it(tmp_path, monkeypatch):
    """An empty directory, no network, memory that is not filled."""
    connect = socket.socket.connect

    def local(self, address):
        assert self.family == socket.AF_UNIX, f"a block of the page connects to {address}; expected no network"
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    torch.use_deterministic_algorithms(False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # at this size they mostly wait for each other
    yield
    torch.set_num_threads(threads)


SLOW = {"docs/export.md"}  # a minute, for what tests/test_export.py does at a smaller size


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in RUNNABLE])
def test_page_runs(as_people_run_it, name):
    run(name, small=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_page_runs_as_it_stands(as_people_run_it, name):
    run(name, small=False)


@pytest.mark.parametrize("name", PAGES)
def test_every_block_is_found(name):
    """Fences and comments in a form that is not understood would leave a block out."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(re.findall(r"^ *(?:```+|~~~+) *(?:python|py)\b", text, re.MULTILINE | re.IGNORECASE)) == len(PAGES[name])
    marks = sum(len(block.marks) for block in PAGES[name])
    assert len(re.findall(r"<!--\s*(?:small|needs|fragment)\b", text)) == marks


@pytest.mark.parametrize(("name", "beginning"), GIVEN)
def test_what_is_given_is_given_to_one_block(name, beginning):
    assert sum(block.code.startswith(beginning) for block in PAGES[name]) == 1
