"""Tables and the plot show what the results files contain."""

import json
import re

import pytest
from bench.measured import MODEL_CASE, OP_CASE, SDPA, timed, written

from benchmarks import harness, report


@pytest.fixture
def results(tmp_path):
    """A folder of results: one engine is faster in a case, one is within the noise, and one is not installed."""
    folder, op = tmp_path / "results" / "cpu", [timed("PyTorch", [4e5] * 3), timed("fastbert", [2e5] * 3)]
    rows = [timed(SDPA, [2e6] * 5), timed("fastbert", [1e6] * 5, memory=5e6)]
    rows += [timed("fastbert, packed input", [5e5] * 5)]
    rows += [timed("OpenVINO", [8e5] * 5), timed("CTranslate2", [9e5, 9e5, 9.7e5, 1.2e6, 1.2e6])]
    rows += [timed("fastbert.prepare", [6e5] * 5), timed("fastbert.prepare, int8", [3e5] * 5)]
    rows += [timed("CTranslate2, int8", [2e5] * 5)]
    rows += [timed("ONNX Runtime", [1e6, 1e6, 9.98e5, 1e6, 1e6])]
    rows += [{"name": "Liger", "absent": "not installed: pip install liger-kernel"}]
    rows += [{"name": "transformers eager", "problem": "wrong: output"}, timed(harness.PRODUCTS, [1e5] * 5, bound=True)]
    left_out = [{"case": "bias_gelu  forward", "reason": "no time was left"}]
    written(folder / "encoder.jsonl", (MODEL_CASE, rows), (MODEL_CASE | {"lengths": "full"}, rows[:2]))
    written(folder / "ops.jsonl", (OP_CASE, [*op, timed("fastbert, reference", [1e5] * 3)]), left_out=left_out)
    written(folder / "growth.jsonl", *((OP_CASE | {"grows": "tokens", "batch": n}, op) for n in (1, 2)))
    return tmp_path


def report_main(folder, *words):
    return report.main(["--results", str(folder / "results"), "--page", str(folder / "page.md"), *words])


def page_of(folder):
    assert report_main(folder) == 0
    return (folder / "page.md").read_text()


def cells(text, *starts):
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row.startswith("|")]
    return [row for row in rows if row[0].startswith(starts)]


def test_the_page_is_what_the_results_give():
    assert report.main(["--check"]) == 0, "run: python -m benchmarks.report"


def test_tables_have_a_ratio_for_each_contender(results):
    text = page_of(results)
    header, line = cells(text, "case", "model base")[:2]
    found = dict(zip(header, line, strict=True))
    assert found["case"] == "model base, 2 layers, forward, 8 × 128, half" and found["ms"] == "1000"
    assert (found["HF SDPA"], found["OpenVINO"], found["packed"]) == ("2.00", "0.80", "0.50")
    assert (found["% floor"], found["% library"], found["memory"]) == ("50", "80", "0.50")
    assert "HF eager" not in header  # it was wrong everywhere
    assert report_main(results, "--check") == 0
    (results / "page.md").write_text(text.replace("| 2.00", "| 3.00"))
    assert report_main(results, "--check") == 1
    assert "bias_gelu forward (no time was left)" in text and "Liger (`pip install liger-kernel`)" in text
    facts = "2030-01-02, commit 012345678, torch 2.13.0, Abacus, 2 threads, AVX2; 3 rounds; load before: 0.1"
    assert f"### ops.jsonl\n\n{facts}\n" in text
    assert len(cells(text, "layer_norm")) == 1 + 2


def test_prepared_models_have_rows_of_their_own(results):
    """Each has every contender's ratio to it, but quantised contenders are compared with quantised forms only."""
    header, *lines = cells(page_of(results), "case", "model base, 2 layers, forward, 8 × 128, half")[:4]
    own, prepared, int8 = (dict(zip(header, line, strict=True)) for line in lines)
    assert [row["type"] for row in (own, prepared, int8)] == ["float32", "float32, prepared", "int8, prepared"]
    assert (prepared["ms"], prepared["OpenVINO"], prepared["% library"]) == ("600", "1.33", "80")
    assert prepared["packed"] == own["CTranslate2, int8"] == prepared["CTranslate2, int8"] == "–"
    assert (int8["OpenVINO"], int8["CTranslate2, int8"], int8["% floor"]) == ("2.67", "0.67", "–")


@pytest.mark.parametrize(("dirty", "words"), [(True, " and changes"), (None, " (tree not checked)")])
def test_a_commit_is_clean_where_somebody_looked(tmp_path, dirty, words):
    written(tmp_path / "results" / "cpu" / "ops.jsonl", dirty=dirty)
    assert f"commit 012345678{words}, torch" in page_of(tmp_path)


def test_every_slower_case_is_listed_the_worst_first(results):
    """Not listed: what is equal to a hundredth, a bound, another form of fastbert, and a quantised contender beside a
    form that is not quantised. Marked: what is faster in some rounds only."""
    title = "model base, 2 layers, forward, 8 × 128, half, float32"
    assert cells(page_of(results).partition("### Slower: cpu\n")[2], "model", "layer_norm") == [
        [title, "fastbert.prepare, int8", "CTranslate2, int8 1.50 (1.50–1.50)", "encoder.jsonl"],
        [title, "fastbert", "OpenVINO 1.25 (1.25–1.25); ~CTranslate2 1.03 (0.83–1.11)", "encoder.jsonl"],
    ]
    (results / "results" / "cpu" / "encoder.jsonl").unlink()
    assert "In no case that was measured." in page_of(results)


@pytest.mark.parametrize(
    ("times", "is_listed", "is_steady"),
    [
        ([1.5, 1.5, 1.5, 1.5, 0.9], True, True),  # the 20th percentile is below 1: it lies between the first two
        ([1.5, 1.5, 0.99], True, False),  # and here above 1
        ([1.006] * 5, False, True),  # 1.01, but only rounded
        ([1.01] * 5, True, True),
    ],
)
def test_slower_is_a_hundredth_in_the_median_and_steady_in_four_of_five_rounds(times, is_listed, is_steady):
    assert (report.is_slower(times), report.is_steady(times)) == (is_listed, is_steady)


def test_a_wrong_result_of_ours_is_nobody_else_s_line(tmp_path):
    """The page says that it is wrong, and shows no other form of fastbert in its place."""
    rows = [timed(SDPA, [2e6, 2e6]), {"name": "fastbert", "problem": "wrong: output"}]
    rows += [timed("fastbert.accelerate", [1e6, 1e6])]
    written(tmp_path / "results" / "cpu" / "encoder.jsonl", (MODEL_CASE, rows))
    text = page_of(tmp_path)
    assert "**Wrong or failed, and so not timed: fastbert in model base, 2 layers, forward" in text
    assert re.search(r"half \| float32 \| wrong \|", text) and "HF SDPA |" not in text


def test_the_plot_is_the_same_bytes_for_the_same_results(results):
    plot = results / "results" / "cpu" / "speedup.svg"
    page_of(results)
    first = plot.read_bytes()
    assert page_of(results).count("/results/cpu/speedup.svg)") == 1
    assert first == plot.read_bytes() and b"<svg" in first and b"OpenVINO" in first  # text is not drawn as paths


NO_DIRECTION = {name: fact for name, fact in OP_CASE.items() if name != "direction"}
HEADLESS = json.dumps({}) + "\n" + json.dumps({"case": OP_CASE, **timed("PyTorch", [1.0])})


@pytest.mark.parametrize(
    "content", ["{", "[]", "", '{"a": 1}\n{"b": 2}', HEADLESS, (NO_DIRECTION, [timed("A", [1.0])])]
)
def test_a_file_that_is_no_result_is_refused(results, content, capsys):
    file = results / "results" / "cpu" / "zz.jsonl"
    file.write_text(content) if isinstance(content, str) else written(file, content)
    assert report_main(results) == 2 and "zz.jsonl is no results file" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("--check",)])
def test_a_page_is_not_replaced_by_an_empty_one(tmp_path, words, capsys):
    page = tmp_path / "page.md"
    page.write_text("before")
    assert report_main(tmp_path, *words) == 2 and page.read_text() == "before"
    assert "there are no results in" in capsys.readouterr().err
    written(tmp_path / "results" / "cpu" / "ops.jsonl", (OP_CASE, [timed("PyTorch", [1.0])]))
    page.unlink()
    assert report_main(tmp_path, "--check") == 2 and "page.md" in capsys.readouterr().err


def test_small_sizes_and_runs_cut_short_are_no_results(results):
    for name in ("encoder_quick", "ops_tiny", "mlm.partial"):
        written(results / "results" / "cpu" / f"{name}.jsonl", (MODEL_CASE, [timed("PyTorch", [1.0])]))
    names = [file.name for file in report.read(results / "results")["cpu"]]
    assert names == ["encoder.jsonl", "growth.jsonl", "ops.jsonl"]
