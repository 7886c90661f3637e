"""Tokenizers from files, and trained ones, give the same tokens as transformers'."""

import json
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
import tokenizers
import transformers
from small_models import TINY, minilm

from fastbert import BertConfig
from fastbert.cli.demo import python_documentation
from fastbert.data import check_tokenizer, get_tokenizer, save_tokenizer, train_tokenizer
from fastbert.data.encode import TooLong, cut_encodings
from fastbert.data.tokenizer import special_token_id

PASSAGES = [text for _, text in python_documentation(2000)][:150]
TEXTS = [
    *PASSAGES[::10],
    "Café naïve İSTANBUL ẞ straße",  # accents, and letters whose lower case is longer
    "日本語 and 中文 text",
    "a [MASK] b <mask> c </s>",  # special tokens in the text
    "x" * 300 + " tabs\tand\u00a0spaces \u200b\ufffd\x00end",  # one word too long for WordPiece; control characters
    "😀 emoji 👩‍👩‍👧",
]


@pytest.fixture(scope="module", params=["wordpiece", "byte-level-bpe"])
def trained(request):
    return request.param, train_tokenizer(PASSAGES, request.param, vocab_size=1500)


def same_as(ours, theirs, texts=TEXTS):
    """Asserts that ids of texts and pairs are equal, and token types and offsets of pairs."""
    for text, pair in zip(texts, texts[1:], strict=False):
        single, both = ours.encode(text), ours.encode(text, pair)
        expected = theirs(text, pair, return_token_type_ids=True, return_offsets_mapping=True)
        assert single.ids == theirs(text).input_ids and both.ids == expected.input_ids
        assert both.type_ids == expected.token_type_ids and both.offsets == expected.offset_mapping


# ---- from files


def test_tokenizer_json_as_it_stands_without_truncation_and_padding():
    tokenizer = get_tokenizer(minilm())
    expected = tokenizers.Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    assert expected.truncation and expected.padding and not tokenizer.truncation and not tokenizer.padding
    expected.no_truncation()
    expected.no_padding()
    assert tokenizer.to_str() == expected.to_str()


@pytest.mark.parametrize("cased", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
    ],
)
@pytest.mark.parametrize(
    "kind", ["BertTokenizerFast", "PreTrainedTokenizerFast", pytest.param("BertTokenizer", marks=pytest.mark.slow)]
)
def test_tokenizer_json_is_normalised_as_its_class_says(tmp_path, cased, config, kind):
    """transformers builds the normaliser of BERT's classes anew, from tokenizer_config.json or from its defaults."""
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    special = {role: f"[{role[:-6].upper()}]" for role in ("unk_token", "pad_token", "cls_token", "sep_token")}
    config = {"tokenizer_class": kind, "mask_token": "[MASK]", **special, **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Hello CAFÉS, 中文", "an Ångström"):
        assert get_tokenizer(tmp_path).encode(text).tokens == theirs.convert_ids_to_tokens(theirs(text)["input_ids"])


@pytest.mark.parametrize("place", ["tokenizer.json", "tokenizer_config.json"])
def test_texts_that_would_be_cut_at_their_beginning_are_told_of(tmp_path, place):
    tokenizer = get_tokenizer(minilm())
    tokenizer.enable_truncation(8, direction="left" if place == "tokenizer.json" else "right")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if place == "tokenizer_config.json":
        (tmp_path / place).write_text(json.dumps({"truncation_side": "left"}))
    with pytest.warns(UserWarning, match="truncation_side is left; texts that are too long are cut at their ends"):
        get_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        None,  # transformers' defaults: lower case
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True},
        {"tokenize_chinese_chars": False, "strip_accents": False},
        {"mask_token": {"content": "[unused7]", "__type": "AddedToken"}},  # as in older files
    ],
)
def test_vocab_txt_is_transformers_bert_tokenizer(tmp_path, config):
    shutil.copy(minilm() / "vocab.txt", tmp_path)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
    ours = get_tokenizer(tmp_path)
    same_as(ours, theirs, TEXTS[:-3] + TEXTS[-1:] if config and "mask_token" in config else TEXTS)
    special = {i for i, token in ours.get_added_tokens_decoder().items() if token.special}
    assert special == set(theirs.all_special_ids)


def test_files_by_themselves_with_a_name_before_theirs(tmp_path):
    path = shutil.copy(minilm() / "vocab.txt", tmp_path / "bert-base-uncased-vocab.txt")
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert get_tokenizer(path).encode("The").tokens == ["[CLS]", "the", "[SEP]"]
    assert get_tokenizer([path, tmp_path / "tokenizer_config.json"]).encode("The").tokens[1] == "[UNK]"
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json, vocab.txt or spm.model"):
        get_tokenizer(tmp_path)  # in a directory, files need their usual names


@pytest.mark.parametrize("place", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(
    ("names", "given", "fits"),
    [
        (["vocab.txt"], "BertJapaneseTokenizer", False),
        (["vocab.txt"], "BertweetTokenizer", False),
        (["vocab.txt"], "BertTokenizerFast", True),
        (["vocab.txt"], "DistilBertTokenizer", True),
        (["vocab.txt"], "ElectraTokenizer", True),
        (["vocab.txt"], "PreTrainedTokenizerFast", True),
        (["vocab.txt"], None, True),
        (["vocab.json", "merges.txt"], "HerbertTokenizerFast", False),  # a BERT whose BPE is not byte-level
        (["vocab.json", "merges.txt"], "RobertaTokenizerFast", True),
    ],
)
def test_files_of_other_tokenizers_are_refused(tmp_path, place, names, given, fits):
    """Only the class that a configuration names tells them apart: the files have the same names."""
    if "vocab.txt" in names:
        shutil.copy(minilm() / "vocab.txt", tmp_path)
    else:
        train_tokenizer(["a text"], "byte-level-bpe", vocab_size=300).model.save(str(tmp_path))
    (tmp_path / place).write_text(json.dumps({"tokenizer_class": given}))
    if fits:
        get_tokenizer(tmp_path)
    else:
        with pytest.raises(ValueError, match=f"{names[0]} is of a {given}; expected one of .*, or a tokenizer.json"):
            get_tokenizer(tmp_path)


@pytest.mark.parametrize("config", [{}, {"add_prefix_space": True}, {"trim_offsets": False}])
def test_merges_are_transformers_roberta_tokenizer(tmp_path, config):
    train_tokenizer(PASSAGES, "byte-level-bpe", vocab_size=1500).model.save(str(tmp_path))  # vocab.json, merges.txt
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "RobertaTokenizer", **config}))
    texts = [text for text in TEXTS if " <mask>" not in text]  # transformers 5 makes that space a token
    same_as(get_tokenizer(tmp_path), transformers.RobertaTokenizer.from_pretrained(tmp_path), texts)
    masked = get_tokenizer(tmp_path).encode("a <mask>").ids
    assert masked[-2:] == [get_tokenizer(tmp_path).token_to_id(token) for token in ("<mask>", "</s>")]
    assert masked[:-2] == get_tokenizer(tmp_path).encode("a").ids[:-1]


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    """A SentencePiece model with DeBERTa-v3's special tokens."""
    import sentencepiece

    path = tmp_path_factory.mktemp("spm") / "spm.model"
    special = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]"}
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(PASSAGES),
        model_prefix=str(path.with_suffix("")),
        vocab_size=600,
        minloglevel=2,
        **{f"{role}_id": index for index, role in enumerate(special)},
        **{f"{role}_piece": name for role, name in special.items()},
    )
    return path


def test_spm_model_is_sentencepiece_s(spm):
    """Ids are equal, for unusual spaces and other scripts too; [MASK] comes after the pieces."""
    import sentencepiece

    theirs, ours = sentencepiece.SentencePieceProcessor(model_file=str(spm)), get_tokenizer(spm.parent)
    odd = ["", "  two  spaces ", " ", "ｆｕｌｌ　ｗｉｄｔｈ", "ﬁ ² ½ Å e\u0301", "\ttabs\n and lines", "a\u200bb"]
    for text in [*PASSAGES, *TEXTS[-6:-4], *TEXTS[-2:], *odd]:
        if "[" not in text:  # ours may find special tokens there
            mine, other = ours.encode(text, add_special_tokens=False).ids, theirs.encode(text)
            # The same pieces in another order are equally likely, so either order is right.
            tie = sorted(mine) == sorted(other) and theirs.decode(mine) == theirs.decode(other)
            assert mine == other or tie, text
    assert ours.token_to_id("[MASK]") == len(theirs)
    pair = ours.encode("one", "two")
    assert [pair.ids[0], pair.ids[-1]] == [theirs.bos_id(), theirs.eos_id()] and pair.type_ids[-1] == 1
    assert ours.decode(ours.encode("one two").ids) == "one two"


def test_spm_model_by_its_configuration(spm, tmp_path):
    shutil.copy(spm, tmp_path)
    config = {"tokenizer_class": "DebertaV2Tokenizer", "do_lower_case": True, "split_by_punct": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = get_tokenizer(tmp_path)
    parts = [ours.encode(part, add_special_tokens=False).ids for part in ("abc", ".", "def")]
    assert ours.encode("ABC.Def", add_special_tokens=False).ids == sum(parts, [])
    save_tokenizer(ours, tmp_path / "saved")
    same_as(ours, transformers.AutoTokenizer.from_pretrained(tmp_path / "saved"), TEXTS[-6:])


def test_added_tokens_keep_their_ids(tmp_path):
    shutil.copy(minilm() / "vocab.txt", tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"[E1]": 30522, "[E2]": 30523}')
    assert get_tokenizer(tmp_path).encode("a [E2] b").ids == [101, 1037, 30523, 1038, 102]
    (tmp_path / "added_tokens.json").write_text('{"[E1]": 30530}')
    with pytest.raises(ValueError, match=r"the added token '\[E1\]' gets the id 30522; expected 30530"):
        get_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({}, FileNotFoundError, "no tokenizer.json, vocab.txt or spm.model, and not both vocab.json and merges.txt"),
        ({"spm.model": b"no protobuf"}, ValueError, "spm.model is not what its name says"),
        ({"spm.model": b""}, ValueError, "spm.model holds no unigram model"),
        ({"vocab.json": b"{}"}, FileNotFoundError, "not both vocab.json and merges.txt"),
        ({"tokenizer.json": b"{"}, ValueError, "tokenizer.json is not what its name says"),
        ({"vocab.txt": b"[PAD]\n[UNK]\n[CLS]\nthe\n"}, ValueError, r"has no '\[SEP\]'; expected the sep_token"),
        ({"vocab.txt": b"[PAD]\n\xff\n"}, ValueError, "vocab.txt is not what its name says: .*utf-8"),
        ({"vocab.json": b"{}", "merges.txt": b"#version: 0.2\n"}, ValueError, "vocab.json has no '<s>'"),
        ({"vocab.json": b"{}", "merges.txt": b"a b\n"}, ValueError, "vocab.json is not what .* `a` out of voc"),
        ({"vocab.txt": b"[PAD]\n", "tokenizer_config.json": b"[1]"}, ValueError, "tokenizer_config.json is not what"),
    ],
)
def test_files_that_make_no_tokenizer_are_refused(tmp_path, files, error, words):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=words):
        get_tokenizer(tmp_path)


@pytest.mark.parametrize(("path", "shown"), [("nowhere", "nowhere"), ("", "''")])
def test_a_path_that_is_not_there(path, shown):
    with pytest.raises(FileNotFoundError, match=f"there is no directory {shown}"):
        get_tokenizer(path)


# ---- trained


def test_a_trained_tokenizer(trained):
    kind, tokenizer = trained
    first = {"wordpiece": "[PAD] [UNK] [CLS] [SEP] [MASK]", "byte-level-bpe": "<s> <pad> </s> <unk> <mask>"}[kind]
    assert [tokenizer.id_to_token(i) for i in range(5)] == first.split()
    assert tokenizer.get_vocab_size() == 1500
    text = "the function returns a list"
    assert len(tokenizer.encode(text).ids) < len(text) / 2  # it has learned words
    expected = text if kind == "byte-level-bpe" else text.lower()
    assert tokenizer.decode(tokenizer.encode(text).ids) == expected
    both = tokenizer.encode("a", "b")
    template = {"wordpiece": ("[CLS] a [SEP] b [SEP]", [0, 0, 0, 1, 1])}
    template["byte-level-bpe"] = ("<s> a </s> </s> b </s>", [0] * 6)
    assert (" ".join(both.tokens), both.type_ids) == template[kind]


@pytest.mark.slow
def test_every_process_trains_the_same_vocabulary():
    """Processes differ in the order of their hash tables, which must not matter."""
    code = """
import hashlib, sys
from fastbert.cli.demo import python_documentation
from fastbert.data import train_tokenizer
for kind in ("wordpiece", "byte-level-bpe"):
    tokenizer = train_tokenizer([text for _, text in python_documentation()][:100], kind, vocab_size=900)
    print(hashlib.sha256(tokenizer.to_str().encode()).hexdigest())
"""
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(2)]
    assert len(runs[0].stdout) == 130 and runs[0].stdout == runs[1].stdout, runs


def test_a_trained_wordpiece_vocabulary_is_the_library_s():
    """Except for equally frequent pairs, of which the library merges a random one first."""
    theirs = tokenizers.BertWordPieceTokenizer(lowercase=True)
    theirs.train_from_iterator(PASSAGES, vocab_size=1500, min_frequency=2, show_progress=False)
    ours = train_tokenizer(iter(PASSAGES), vocab_size=1500)
    one, two = set(ours.get_vocab()), set(theirs.get_vocab())
    assert len(one) == len(two) == 1500 and len(one & two) > 1470
    assert {token for token in one if len(token.removeprefix("##")) == 1} == {
        token for token in two if len(token.removeprefix("##")) == 1
    }


def test_bytes_are_never_unknown_to_a_byte_level_bpe():
    tokenizer = train_tokenizer(["only a few letters"], "byte-level-bpe", vocab_size=300)
    text = "日本語 😀 \x00 ü\n\t"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_lower_case_is_a_choice():
    for kind, default in (("wordpiece", True), ("byte-level-bpe", False)):
        for lowercase in (None, True, False):
            tokenizer = train_tokenizer(["Ab ab AB"] * 9, kind, vocab_size=400, lowercase=lowercase)
            lowered = tokenizer.encode("AB").ids == tokenizer.encode("ab").ids
            assert lowered == (default if lowercase is None else lowercase), (kind, lowercase)


@pytest.mark.parametrize("model_beside", [False, True])
def test_transformers_reads_what_is_saved(trained, tmp_path, model_beside):
    _, tokenizer = trained
    if model_beside:
        (tmp_path / "config.json").write_text(json.dumps(TINY.to_dict()))
    tokenizer.enable_truncation(5)  # a setting of one use, which is not saved
    save_tokenizer(tokenizer, tmp_path)
    tokenizer.no_truncation()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    same_as(tokenizer, theirs)
    assert "token_type_ids" in theirs("a", "b")
    roles = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    assert {getattr(theirs, f"{role}_id") for role in roles} == set(range(5)) and len(theirs) == 1500
    assert get_tokenizer(tmp_path).to_str() == tokenizer.to_str()
    save_tokenizer(theirs, tmp_path / "again")  # a tokenizer of transformers
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "again").mask_token == theirs.mask_token


def test_transformers_knows_where_to_cut(tmp_path):
    """At the model's length, less the positions that RoBERTa cannot use, or at that of transformers' tokenizer."""
    theirs = transformers.AutoTokenizer.from_pretrained(minilm())
    unknown = transformers.PreTrainedTokenizerFast(tokenizer_object=get_tokenizer(minilm()))
    roberta = TINY.changed(model_type="roberta", pad_token_id=1, type_vocab_size=1)  # of 32 positions
    for name, tokenizer, config, expected in (
        ("theirs", theirs, None, 512),
        ("the model's", get_tokenizer(minilm()), TINY, 32),
        ("with an offset", get_tokenizer(minilm()), roberta, 30),
        ("theirs, which knows none", unknown, TINY, 32),
        ("another model's", get_tokenizer(minilm()), {"model_type": "t5"}, None),
        ("no model's", get_tokenizer(minilm()), None, None),
    ):
        directory = tmp_path / name
        directory.mkdir()
        if config is not None:
            values = config if isinstance(config, dict) else config.to_dict()
            (directory / "config.json").write_text(json.dumps(values))
        save_tokenizer(tokenizer, directory)
        found = json.loads((directory / "tokenizer_config.json").read_text()).get("model_max_length")
        assert found == expected, name
    again = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "with an offset")
    assert len(again("word " * 99, truncation=True).input_ids) == 30


@pytest.mark.parametrize(
    ("texts", "more", "error", "words"),
    [
        (["a"], {"kind": "unigram"}, ValueError, "kind is 'unigram'; expected one of 'wordpiece', 'byte-level-bpe'"),
        ([], {}, ValueError, "texts is empty"),
        (["a"], {"vocab_size": 0}, ValueError, "vocab_size is 0, min_frequency is 2; expected numbers above 0"),
        (["abc def"], {"vocab_size": 6}, ValueError, r"vocab_size is 6; expected at least \d+"),
        (["abc"], {"kind": "byte-level-bpe", "vocab_size": 200}, ValueError, "size is 200; expected at least 261"),
        ("abc", {}, TypeError, "texts is a str; expected several strings"),
        (["a", b"b"], {}, TypeError, r"texts\[1\] is a bytes; expected a string"),
    ],
)
def test_training_that_makes_no_sense_is_refused(texts, more, error, words):
    with pytest.raises(error, match=words):
        train_tokenizer(texts, **more)


# ---- with a model's configuration


@pytest.mark.parametrize("declared", [True, False])
def test_a_declared_special_token_goes_before_one_that_is_only_in_the_vocabulary(tmp_path, declared):
    names = ["<s>", "<pad>", "</s>", "<unk>", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "<mask>", "a"]  # as MPNet has them
    model = tokenizers.models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if declared else [])
    own = [special_token_id(tokenizer, role) for role in ("cls_token", "pad_token", "sep_token", "mask_token")]
    assert own == ([0, 1, 2, 8] if declared else [5, 4, 6, 7])
    save_tokenizer(tokenizer, tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["mask_token"] == ("<mask>" if declared else "[MASK]")
    if declared:
        check_tokenizer(tokenizer, BertConfig(vocab_size=10, pad_token_id=1))


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(trained):
    kind, tokenizer = trained
    pad = tokenizer.token_to_id("[PAD]" if kind == "wordpiece" else "<pad>")
    check_tokenizer(tokenizer, BertConfig(vocab_size=1500, pad_token_id=pad))
    check_tokenizer(tokenizer, BertConfig(vocab_size=1536, pad_token_id=None))  # spare rows, as models have them
    check_tokenizer(tokenizer, BertConfig(vocab_size=1536, pad_token_id=1500))  # a row without a token
    check_tokenizer(get_tokenizer(minilm()), BertConfig.from_pretrained(minilm()))
    check_tokenizer(transformers.AutoTokenizer.from_pretrained(minilm()), BertConfig.from_pretrained(minilm()))
    with pytest.raises(ValueError, match="the tokenizer has .* at 1499; expected ids below the vocab_size .*, 1499"):
        check_tokenizer(tokenizer, BertConfig(vocab_size=1499))
    other = tokenizer.id_to_token(7)
    with pytest.raises(ValueError) as error:
        check_tokenizer(tokenizer, BertConfig(vocab_size=1500, pad_token_id=7))
    assert f"pad_token_id of the model is 7, which is {other!r} in the tokenizer; expected {pad}" in str(error.value)


# ---- of a long text, only the beginning is tokenised


class Noted:
    """A tokenizer that notes how many characters it is given."""

    def __init__(self, tokenizer):
        self.tokenizer, self.characters = tokenizer, 0

    def encode_batch(self, inputs, **options):
        self.characters += sum(len(text) for one in inputs for text in ((one,) if isinstance(one, str) else one))
        return self.tokenizer.encode_batch(inputs, **options)


def cut(tokenizer, inputs, length):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return [
            [np.array(column)[left].tolist() for column in (encoding.ids, encoding.type_ids, encoding.offsets)]
            for encoding, left in cut_encodings(tokenizer, inputs, length)
        ]


def unigram(texts, size):
    """As SentencePiece's in XLM-RoBERTa: words begin with a mark of their own."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = tokenizers.normalizers.NFKC(), tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(vocab_size=size, unk_token="<unk>", special_tokens=["<unk>", "<s>"])
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return tokenizer


@pytest.mark.parametrize("kind", ["wordpiece", "byte-level-bpe", "unigram"])
# Of a pair's tokens an odd number is divided unequally.
@pytest.mark.parametrize("length", [65, pytest.param(64, marks=pytest.mark.slow)])
def test_the_beginning_of_a_long_text_has_the_tokens_of_the_whole(kind, length, monkeypatch):
    passages = [passage for _, passage in python_documentation()]
    tokenizer = (
        unigram(passages[:200], 600) if kind == "unigram" else train_tokenizer(passages[:200], kind, vocab_size=600)
    )
    long, short = " \n ".join(passages[:40]), passages[1][:300]
    inputs = [
        long,
        short,
        "x" * 9999,
        " " * 9999 + short,
        "a b\u0301 " * 2000,
        (short, long),
        (long, short),
        (long, long),
        (long, ". " * 500),  # of which there are more tokens than of the beginning
        (". " * 500, long),
    ]
    given = Noted(tokenizer)
    found = cut(given, inputs[:-2], length)
    assert given.characters < 1.2 * (2 * len(long) + 4 * 9999)  # the last pair, and texts without a space to end at
    found += cut(tokenizer, inputs[-2:], length)
    monkeypatch.setattr("fastbert.data.encode._LONG", 1 << 30)
    assert found == cut(tokenizer, inputs, length)
    monkeypatch.undo()
    with pytest.raises(TooLong, match=r"texts\[0\] has more than \d+ tokens; expected at most 64"):
        list(cut_encodings(tokenizer, [long], 64, truncation=False))
