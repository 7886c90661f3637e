"""Corpus filters: which texts they leave out, how these are counted, and that texts pass one by one."""

import json
import random
import sys
import tracemalloc

import pytest
from small_models import minilm

from fastbert import cli
from fastbert.data import (
    Filtered,
    TokenFile,
    by_length,
    by_letters,
    get_tokenizer,
    no_duplicates,
    no_near_duplicates,
    write_tokens,
)

TEXTS = ["", "a text", "12 34 56", "a text", "another text, longer than that", "a Text", "ab1", "a text"]


def test_what_each_filter_leaves_out_is_counted():
    def no_capitals(text):
        return text.islower()

    kept = Filtered(TEXTS, by_length(3, 20), by_letters(0.6), no_capitals, no_duplicates())
    assert list(kept) == ["a text", "ab1"]
    counts = {"by_length": 2, "by_letters": 1, "no_capitals": 1, "no_duplicates": 2}
    assert (kept.read, dict(kept.left_out)) == (8, counts)
    assert str(kept) == ("2 of 8 texts kept; left out: 2 by_length, 1 by_letters, 1 no_capitals, 2 no_duplicates")
    with pytest.raises(ValueError, match="its texts were read before; expected new filters"):
        list(kept)


def test_lengths_and_letters_at_their_borders():
    assert [by_length(2, 4)(text) for text in (" a ", " ab ", "abcd", "abcde")] == [False, True, True, False]
    assert [by_letters(0.5)(text) for text in ("", "a1", "a12", "é 1", "語1", "नि1 2", "1 2")] == [
        True, True, False, True, True, True, False,
    ]  # fmt: skip


def test_texts_pass_one_by_one_and_only_hashes_stay():
    """The texts have about 100 kB each, so keeping them would take 100 MB."""

    def texts():
        for i in range(1000):
            taken.append(i)
            yield f"{i} " * 25_000

    taken, kept = [], iter(Filtered(texts(), by_length(), no_duplicates()))
    next(kept)
    assert taken == [0]
    tracemalloc.start()
    try:
        assert sum(1 for _ in kept) == 999
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()


def jaccard(one, two):
    one, two = ({text[i : i + 7] for i in range(len(text) - 6)} for text in (one, two))
    return len(one & two) / len(one | two)


def test_near_duplicates_are_left_out_and_others_are_not():
    """The truth is the computed Jaccard index: above 0.95 or below 0.5, because between these chance decides."""
    pytest.importorskip("datasketch")
    random.seed(0)
    words = ["".join(random.choices("abcdefghij", k=random.randint(2, 9))) for _ in range(500)]
    originals = [" ".join(random.choices(words, k=150)) for _ in range(40)]
    near = [text.replace(text.split()[70], "changed", 1) for text in originals]
    half = [text[: len(text) // 2] + " " + " ".join(random.choices(words, k=75)) for text in originals]
    assert min(map(jaccard, originals, near)) > 0.95 and max(map(jaccard, originals, half)) < 0.5
    kept = Filtered([*originals, *near, *half], no_near_duplicates(0.8))
    assert list(kept) == originals + half and kept.left_out == {"no_near_duplicates": 40}
    again = Filtered([originals[0], "  ".join(originals[0].upper().split()), "short", "Short"], no_near_duplicates())
    assert list(again) == [originals[0], "short"]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: by_length(5, 4), "by_length: least is 5, most is 4; expected 0 <= least <= most"),
        (lambda: by_letters(1.5), "by_letters: least is 1.5; expected a share, 0 to 1"),
        (lambda: no_near_duplicates(1.0), "no_near_duplicates: threshold is 1.0; expected a number above 0, at most"),
    ],
)
def test_filters_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match="Filtered: a filter is 3; expected a function"):
        Filtered([], 3)
    with pytest.raises(TypeError, match=r"Filtered: texts\[1\] is a int; expected a string"):
        list(Filtered(["a", 1]))


def test_without_datasketch_its_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ModuleNotFoundError, match="pip install datasketch"):
        no_near_duplicates()


def test_a_filtered_corpus_is_that_of_what_is_kept(tmp_path):
    tokenizer = get_tokenizer(minilm())
    write_tokens(Filtered(TEXTS, by_length(), no_duplicates()), tokenizer, tmp_path / "filtered")
    write_tokens(list(dict.fromkeys(TEXTS[1:])), tokenizer, tmp_path / "plain")
    for name in ("tokens.npy", "ends.npy"):
        assert (tmp_path / "filtered" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_the_command_prepares_files(tmp_path, capsys):
    for name, texts in (("one", TEXTS[:4]), ("two", TEXTS[4:])):
        (tmp_path / name).write_text("\n".join(texts) + "\n")
    files = [str(tmp_path / name) for name in ("one", "two")]
    more = ["--min-characters", "3", "--max-characters", "20", "--letters", "0.6", "--no-duplicates"]
    command = ["prepare", "--text", *files, "--tokenizer", str(minilm()), "--output", str(tmp_path / "corpus")]
    assert cli.main([*command, *more]) == 0
    said = capsys.readouterr().out
    assert "3 of 8 texts kept; left out: 2 by_length, 1 by_letters, 2 no_duplicates\n" in said
    counts = json.loads((tmp_path / "corpus" / "tokens.json").read_text())
    assert f"3 texts, {counts['tokens']} tokens" in said and len(TokenFile(tmp_path / "corpus")) == 3
    assert cli.main(command) == 2 and "expected a new directory" in capsys.readouterr().err
    assert cli.main([*command, "--letters", "2"]) == 2 and "by_letters: least is 2.0" in capsys.readouterr().err
