"""`python -m benchmarks.run`: which cases it runs, and what it leaves."""

import dataclasses
import importlib
import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench.measured import ROOT, ROW_OPS, TIMED, Clock, measure, raising, read, reasons, tiny

from benchmarks import batch, cases, floor, provenance, report, run
from benchmarks.cases import BACKWARD, DROPOUT, FORWARD, STEP
from benchmarks.contenders.interface import ENCODER, MASKED_LM, MODEL, OPS
from fastbert import backends

# ---- which cases


def chosen(*words):
    return run.arguments([*words, "--device", "cpu"]).specs


def test_the_default_on_a_cpu_is_what_matters():
    """The default has latency, batches with and without padding, text, training and every op, but not `growth`, which
    takes longer than all of that."""
    found = chosen("--dtypes", "float32")
    assert list(dict.fromkeys(group for group, _ in found)) == list(cases.DEFAULT) and "growth" not in cases.DEFAULT
    first = found[0][1]
    assert (first.part, first.size.batch, first.size.config.num_hidden_layers) == (MODEL, 1, 12)
    kinds = {(spec.part, spec.direction) for _, spec in found}
    assert kinds >= {(MODEL, DROPOUT), (MASKED_LM, STEP), (ENCODER, BACKWARD)}
    assert {spec.lengths for group, spec in found if group == "encoder"} == set(batch.DISTRIBUTIONS)
    assert {spec.part for group, spec in found if group == "ops"} == set(OPS)
    assert len(set(map(repr, found))) == len(found)


def test_gpu_cases_have_the_sizes_that_were_asked_for():
    specs = [spec for group, spec in run.arguments(["--device", "cuda"]).specs if group == "encoder"]
    sizes_of = lambda hidden: {(s.size.batch, s.size.seqlen) for s in specs if s.size.config.hidden_size == hidden}  # noqa: E731
    assert sizes_of(768) == {(1, 128), (8, 128), (32, 128), (8, 512), (32, 512)}
    assert sizes_of(1024) == {(1, 128), (32, 128), (32, 512)}
    assert {spec.dtype for spec in specs} == set(cases.DTYPES)
    assert [spec.dtype for spec in specs][:3] == ["bfloat16"] * 3  # the type that the device is best at comes first


def test_options_take_the_place_of_what_the_table_has():
    words = ["--groups", "encoder", "--parts", "model", "--models", "base", "large", "--shapes", "1x128", "8x512"]
    words += ["--lengths", "text", "--directions", "forward", "dropout", "--dtypes", "float16", "--layers", "3"]
    found = [(s.size.config.hidden_size, s.size.batch, s.size.seqlen, s.direction) for _, s in chosen(*words)]
    shapes = [(hidden, *shape) for hidden in (768, 1024) for shape in ((1, 128), (8, 512))]
    assert sorted(found) == sorted((*shape, way) for shape in shapes for way in (FORWARD, DROPOUT))
    facts = {(s.dtype, s.lengths, s.size.config.num_hidden_layers) for _, s in chosen(*words)}
    assert facts == {("float16", "text", 3)}


def test_types_follow_one_another_and_what_comes_last_follows_all():
    found = chosen("--groups", "mlm", "ops", "--dtypes", "float32", "bfloat16")
    order = [(spec.part == MASKED_LM and spec.direction == DROPOUT, spec.dtype != "float32") for _, spec in found]
    assert order == sorted(order) and len(set(order)) == 4
    assert {group for group, _ in found[: len(found) // 2]} == {"mlm", "ops"}


def test_growth():
    found = [spec for _, spec in chosen("--groups", "growth", "--dtypes", "float32")]
    tokens = [s.size.batch * s.size.seqlen for s in found if (s.part, s.direction) == (ENCODER, FORWARD)]
    assert tokens == [2**n for n in range(7, 17)]
    attention = [s.size for s in found if (s.part, s.direction) == ("attention", BACKWARD)]
    assert [size.seqlen for size in attention] == [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert {size.batch * size.seqlen for size in attention} == {8192}
    done = run.measured(dataclasses.replace(tiny("attention", "full"), grows="seqlen"), TIMED)
    assert {row.name for row in done.rows} <= set(run.GROWTH) and report.cases_of(done.lines())[0].family == "growth"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "decoder"], "no part decoder in the groups"),
        (["--shapes", "8by128"], "'8by128' is no shape"),
        (["--contenders", "TensorRT"], "invalid choice: 'TensorRT'"),
        (["--layers", "0"], "'0' is no number above 0"),
        (["--groups", "hf", "--models", "large"], "--models does not go with encode"),
        (["--groups", "ops", "--layers", "2"], "--layers does not go with attention"),
        (["--minutes", "nan"], "'nan' is no time above 0"),
        (["--minutes", "-1"], "'-1' is no time above 0"),
        (["--groups", "mlm", "--dtypes", "float32", "--device", "cpu", "--skip", "3"], "--skip 3: there are 2 cases"),
        (["--quick", "--shapes", "8x128"], "--shapes goes with --size full; quick is one small shape"),
        (["--groups", "growth", "--lengths", "half"], "--lengths does not go with the group growth"),
        (["--groups", "ops", "--directions", "step"], "no case of the groups ops is left"),
    ],
)
def test_wrong_options_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as error:
        run.arguments(words)
    assert error.value.code == 2 and message in capsys.readouterr().err


# ---- runs, and what they leave


@pytest.fixture
def quick(monkeypatch):
    """Replaces the measurement of a case by one that takes no time. `quick.before` is called before each case."""
    hooks = SimpleNamespace(before=lambda: None)

    def measured(spec, how):
        hooks.before()
        return measure(Clock(), {"base": 1.0}, case=spec.facts())

    monkeypatch.setattr(run, "measured", measured)
    return hooks


def nth(number, act):
    """A function that calls `act` in its call of that number, and in no other."""
    left = [number]

    def call(*args):
        left[0] -= 1
        if left[0] == 0:
            act()

    return call


def test_results_name_commit_versions_and_machine_but_no_host_and_no_path(tmp_path):
    """A real run, whose file the report can read."""
    assert run.main([*ROW_OPS, "--rounds", "2", "--seed", "5", "--out", str(tmp_path / "cpu")]) == 0
    path = tmp_path / "cpu" / "ops_tiny.jsonl"
    head, lines = read(path)
    assert {json.dumps(found["case"]) for found in lines} == {json.dumps(spec.facts()) for _, spec in chosen(*ROW_OPS)}
    assert head["seed"] == 5 and head["ceilings"]["float32"]["bandwidth"] > 0 and head["load"] >= 0
    assert torch.__version__.startswith(head["versions"]["torch"]) and head["versions"]["fastbert"]
    assert f"{torch.get_num_threads()} threads" in head["machine"] and len(head) <= 12
    assert {"commit", "dirty", "date", "command"} <= head.keys()
    assert all(word not in path.read_text() for word in (socket.gethostname(), str(ROOT), str(tmp_path)))
    mine = next(found for found in lines if found["name"] == "fastbert")
    choice = backends.choose(mine["case"]["op"], "cpu", torch.float32, backward=False)
    assert mine["ran"] == choice and mine["error"] <= 1 and len(mine["samples"]) == 2
    path.rename(path.with_name("ops.jsonl"))
    assert report.main(["--results", str(tmp_path), "--page", str(tmp_path / "page.md")]) == 0
    assert "| layer_norm, forward, 3 × 17, full " in (tmp_path / "page.md").read_text()


def test_command_line_keeps_no_absolute_path():
    words = ["/usr/bin/python3", "-m", "benchmarks.run", "--out", "/a/b/c", "--commit=abc", "--out=/a/d"]
    assert provenance.command(words) == "python -m benchmarks.run --out c --commit=abc --out=d"


def test_commit_is_git_s(monkeypatch):
    answers = {"rev-parse": "abc", "status": " M setup.py"}
    monkeypatch.setattr(provenance, "_output", lambda *words: answers.get(words[1]))
    assert provenance.git_state() == ("abc", True)
    answers["status"] = ""
    assert provenance.git_state() == ("abc", False)
    answers["status"] = None  # for example, git cannot read the index
    assert provenance.git_state() == ("abc", None)
    answers.clear()
    assert provenance.git_state() == (None, None) and provenance.head("def")["commit"] == "def"


def test_a_run_that_is_cut_short_leaves_what_it_has_and_replaces_no_whole_one(tmp_path, quick, monkeypatch, capsys):
    path, partial = tmp_path / "ops_tiny.jsonl", tmp_path / "ops_tiny.partial.jsonl"
    assert run.main([*ROW_OPS, "--minutes", "1e-9", "--out", str(tmp_path)]) == 0 and not path.exists()
    shown = capsys.readouterr().out
    assert "0 cases; 4 left out" in shown and "fastbert took no part" in shown and "was right" not in shown
    quick.before = nth(3, raising(KeyboardInterrupt))
    assert run.main([*ROW_OPS, "--out", str(tmp_path)]) == 0
    head, lines = read(path)
    assert len(lines) == 2 and reasons(head) == ["interrupted"] * 2
    quick.before = nth(2, raising(torch.OutOfMemoryError("CUDA out of memory")))  # others are kept
    assert run.main([*ROW_OPS, "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "wrong or failed:" in shown and "stays: see ops_tiny.partial.jsonl" in shown
    head, lines = read(partial)  # `path` has the second case, so it is not replaced
    assert len(lines) == 3 and reasons(head) == ["failed: OutOfMemoryError: CUDA out of memory"]
    assert len(read(path)[1]) == 2
    assert run.main([*ROW_OPS, "--seed", "7", "--out", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == [path] and read(path)[0]["seed"] == 7
    now = run.Run(run.arguments([*ROW_OPS, "--out", str(tmp_path)]))
    quick.before = nth(2, lambda: setattr(now, "deadline", 0))
    now.run()
    assert reasons(read(partial)[0]) == ["no time was left"] * 2 and len(read(path)[1]) == 4 and now.conclude() == 0
    shown = capsys.readouterr().out
    assert "\ncase 2 of 4\n" in shown and "case 3 of 4" not in shown.rpartition("case 2 of 4")[2]
    assert shown.splitlines()[-1].startswith("cut off before case 3: ")  # what benchmarks.gpu.on_gpu reads


def test_a_lost_gpu_costs_one_case(tmp_path, quick, monkeypatch, capsys):
    """The run ends there. The next one continues after that case, in the same file if it is of the same commit."""
    words = [*ROW_OPS, "--out", str(tmp_path)]
    monkeypatch.setattr(run, "require_device", nth(2, raising(run.GpuLost("failed: AcceleratorError: illegal access"))))
    assert run.main(words) == 3
    assert capsys.readouterr().out.splitlines()[-1].startswith("GPU lost in case 2: ")
    head, lines = read(tmp_path / "ops_tiny.jsonl")
    assert len(lines) == 2 and [reason.endswith("illegal access") for reason in reasons(head)] == [True, True]
    assert run.main([*words, "--skip", "2", "--add"]) == 0
    head, lines = read(tmp_path / "ops_tiny.jsonl")
    assert len({json.dumps(found["case"]) for found in lines}) == len(lines) == 4 and head["left_out"] == []
    assert [set(more) for more in head["continued"]] == [{"date", "command", "seed", "ceilings"}]
    assert run.main([*words, "--skip", "3", "--add"]) == 0  # the last case again: its lines are replaced
    assert len(read(tmp_path / "ops_tiny.jsonl")[1]) == 4
    monkeypatch.setattr(provenance, "git_state", lambda: ("another", False))
    assert run.main([*words, "--skip", "2", "--add"]) == 0  # another commit's file is not added to
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["ops_tiny.jsonl", "ops_tiny.partial.jsonl"]


def test_only_runs_of_one_kind_share_a_file(tmp_path, quick, monkeypatch, capsys):
    """Of one machine, with the same versions; each keeps the ceilings that its floors were computed from."""
    words, path = [*ROW_OPS, "--add", "--out", str(tmp_path)], tmp_path / "ops_tiny.jsonl"
    assert run.main(words) == 0
    floor.ceilings.cache_clear()
    assert run.main(words) == 0
    head, before = read(path)[0], path.read_bytes()
    assert head["ceilings"]["float32"] != head["continued"][0]["ceilings"]["float32"]
    for name, other in (("machine", "Abacus"), ("versions", {"torch": "1.0"})):
        with monkeypatch.context() as patch:
            patch.setattr(provenance, name, lambda found=other: found)
            assert run.main(words) == 2
        assert f"ops_tiny.jsonl cannot be added to: its {name} is" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("words", [["--output", "file/of/results"], ["--output", "."], ["--rounds", "0"]])
@pytest.mark.parametrize("name", ["serving.__main__", "corpora"])
def test_services_and_corpora_refuse_at_once_what_cannot_work(name, words, tmp_path, monkeypatch):
    pytest.importorskip("httpx")
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(SystemExit) as error:
        importlib.import_module(f"benchmarks.{name}").main(words)
    assert error.value.code == 2


def test_a_narrower_run_does_not_replace_a_richer_one(tmp_path, quick, monkeypatch):
    words, path, people = (
        [*ROW_OPS, "--out", str(tmp_path)],
        tmp_path / "ops_tiny.jsonl",
        {"base": 1.0, "fastbert": 1.0},
    )
    monkeypatch.setattr(run, "measured", lambda spec, how: measure(Clock(), people, case=spec.facts()))
    assert run.main(words) == 0
    del people["fastbert"]
    assert run.main(words) == 0
    assert (len(read(path)[1]), len(read(tmp_path / "ops_tiny.partial.jsonl")[1])) == (8, 4)


@pytest.mark.parametrize("content", ['{"commit": "a"}\n{"case"', '{"a": 1}\n{"b": 2}'])
def test_a_file_that_cannot_be_read_is_not_overwritten(tmp_path, quick, content, capsys):
    path = tmp_path / "ops_tiny.jsonl"
    path.write_text(content)
    assert run.main([*ROW_OPS, "--out", str(tmp_path)]) == 2 and path.read_text() == content
    assert "ops_tiny.jsonl is no results file" in capsys.readouterr().err


def test_a_run_that_could_keep_no_results_does_not_begin(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "measured", raising(AssertionError("it began")))
    file = tmp_path / "file"
    file.touch()
    for out in (file, file / "folder"):
        assert run.main([*ROW_OPS, "--out", str(out)]) == 2 and str(file) in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([*ROW_OPS, "--device", "cuda", "--out", str(tmp_path)]) == 2
    assert "PyTorch finds no GPU" in capsys.readouterr().err


def test_one_file_for_all_groups_and_none_for_a_verification(tmp_path, quick):
    words = ["--size", "tiny", "--groups", "ops", "mlm", "--dtypes", "float32", "--parts", "layer_norm", "masked LM"]
    words += ["--compile", "--out", str(tmp_path)]
    assert run.main([*words, "--verify-only"]) == 0 and not list(tmp_path.iterdir())
    assert run.main([*words, "--name", "both"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["both_tiny.jsonl"]
    assert len(read(tmp_path / "both_tiny.jsonl")[1]) == 2 + 2


@pytest.mark.slow
def test_pytest_benchmark_runs_the_same_cases():
    """A contender that does not do a case is skipped, with the reason."""
    words = ["-q", "-rs", "--size", "tiny", "--benchmark-disable", "-p", "no:cacheprovider"]
    words += ["-k", "(layer_norm and forward and not backward) or (masked and full and step)"]
    words += ["benchmarks/bench_ops.py", "benchmarks/bench_models.py"]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slow to make" in done.stdout and "runs on cuda only" in done.stdout and " passed" in done.stdout
