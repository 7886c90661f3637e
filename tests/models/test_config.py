import dataclasses
import json

import pytest
import torch
import transformers

import fastbert
from fastbert import BertConfig, BertModel
from fastbert.families import BY_MODEL_TYPE


def test_defaults_are_hugging_face_s():
    theirs = transformers.BertConfig()
    for field in dataclasses.fields(BertConfig):
        if field.name not in ("extra", "embedding_size"):  # which transformers does not have
            assert getattr(BertConfig(), field.name) == getattr(theirs, field.name) == field.default, field.name


UNDECLARED = {  # fields that transformers' DeBERTa reads, though its configuration does not declare them
    "position_buckets": -1,
    "share_att_key": False,
    "norm_rel_ebd": "none",
    "conv_kernel_size": 0,
    "conv_groups": 1,
    "conv_act": "tanh",
    "cls_dropout": None,
    "embedding_size": 1536,
}


@pytest.mark.parametrize("model_type", BY_MODEL_TYPE)
def test_each_family_has_its_own_names_and_defaults(model_type):
    theirs = transformers.AutoConfig.for_model(model_type)
    values = theirs.to_dict() | (UNDECLARED if model_type == "deberta-v2" else {})
    ours = BertConfig(model_type=model_type).to_dict()
    assert ours == {name: values[name] if name in values else getattr(theirs, name) for name in ours}
    assert BertConfig.from_dict({"model_type": model_type}).to_dict() == ours
    assert {**values, **BertConfig.from_dict(values).to_dict()} == {**values, "num_labels": 2, "problem_type": None}


@pytest.mark.parametrize(
    ("name", "millions", "vocabulary"),
    [  # published: Devlin et al. 2018; Turc et al., "Well-Read Students Learn Better", 2019, table 1
        ("bert-base-uncased", 110, 30522),
        ("bert-large-uncased", 340, 30522),
        ("bert-base-cased", 110, 28996),
        ("bert-medium", 41.7, 30522),
        ("bert-small", 29.1, 30522),
        ("bert-mini", 11.3, 30522),
        ("bert-tiny", 4.4, 30522),
    ],
)
def test_presets_have_the_published_size(name, millions, vocabulary):
    config = BertConfig.preset(name)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in BertModel(config).parameters())
    assert config.vocab_size == vocabulary and abs(parameters / 1e6 - millions) <= 0.025 * millions
    assert BertConfig.preset(f"{name} ({millions}M)") == config


def test_presets_have_the_hub_s_newer_names_too():
    names = ("google-bert/bert-base-cased", "FacebookAI/roberta-base", "albert/albert-base-v2")
    assert [BertConfig.preset(name) for name in names] == [BertConfig.preset(name.split("/")[1]) for name in names]


@pytest.mark.parametrize("name", ["bert-base", "bert-base-uncased (340M)", "", "BERT-base-uncased"])
def test_unknown_presets_list_the_known_ones(name):
    with pytest.raises(ValueError, match=r"unknown model .*; known, .*bert-base-uncased \(110M\), .*bert-tiny"):
        BertConfig.preset(name)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_attention_heads": 7}, r"num_attention_heads is 7, which does not divide hidden_size \(768\)"),
        ({"hidden_size": 0}, "hidden_size is 0; expected a positive integer"),
        ({"hidden_size": "768"}, "hidden_size is '768'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_act": ["gelu"]}, "hidden_act is"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; expected one of gelu"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob is 1.0"),
        ({"attention_probs_dropout_prob": float("nan")}, "attention_probs_dropout_prob is nan"),
        ({"layer_norm_eps": -1}, "layer_norm_eps is -1"),
        ({"pad_token_id": 30522}, "pad_token_id is 30522"),
        ({"extra": {"is_decoder": True}}, "is_decoder is True; expected False"),
        ({"extra": {"position_embedding_type": "relative_key"}}, "position_embedding_type is 'relative_key'"),
        ({"extra": {"model_type": "roberta"}}, "model_type is 'roberta'; expected 'bert'"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; expected one of bert, roberta, .*albert"),
        ({"model_type": None}, "model_type is None; expected one of bert"),
        ({"embedding_size": 128}, r"embedding_size is 128; expected None or hidden_size \(768\): BERT does not"),
        ({"model_type": "albert", "embedding_size": 0}, "embedding_size is 0; expected None or a positive integer"),
        ({"model_type": "albert", "inner_group_num": 2}, "inner_group_num is 2; expected 1"),
        ({"model_type": "albert", "num_hidden_groups": 13}, r"num_hidden_groups is 13; .* num_hidden_layers \(12\)"),
        ({"model_type": "albert", "classifier_dropout": None}, "classifier_dropout_prob is None; expected a number"),
        ({"model_type": "roberta", "pad_token_id": None}, "pad_token_id is None; expected an id below 511: in RoBERTa"),
        ({"model_type": "camembert", "pad_token_id": 511}, "pad_token_id is 511; expected an id below 511"),
        ({"model_type": "distilbert", "layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-05; expected 1e-12, which is all"),
        ({"model_type": "distilbert", "hidden_size": 770}, r"n_heads is 12, which does not divide dim \(770\)"),
        ({"model_type": "distilbert", "hidden_act": "relu"}, "activation is 'relu'; expected one of gelu"),
        ({"model_type": "distilbert", "qa_dropout": 1}, "qa_dropout is 1; expected a number in"),
        ({"model_type": "electra", "extra": {"is_decoder": True}}, "is_decoder is True; expected False"),
    ],
)
def test_nonsense_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        BertConfig(**fields)


def test_unknown_keywords_are_refused():
    for fields in ({"hiden_size": 1}, {"num_hidden_groups": 2}, {"model_type": "albert", "dim": 1}):
        with pytest.raises(TypeError, match="BertConfig: .*: no field of a"):
            BertConfig(**fields)


def test_changes_of_unknown_fields_are_refused():
    config = BertConfig.from_dict({"my_note": 1, "torch_dtype": "float16"})
    changes = {"my_note": 2, "num_labels": 1, "id2label": {0: "a"}, "label2id": {"a": 0}}
    assert config.changed(**changes).to_dict() == config.to_dict() | changes
    albert = {"model_type": "albert", "num_hidden_groups": 2, "classifier_dropout_prob": 0.1}
    assert config.changed(**albert).layer_groups == 2
    for name in ("num_lables", "qa_dropout", "dim", "torch_dtype", "extra"):
        with pytest.raises(TypeError, match=f"BertConfig: {name}: no field of a bert configuration"):
            config.changed(**{name: None})


def test_a_family_s_own_names_are_understood_and_written():
    config = BertConfig.from_dict({"model_type": "distilbert", "dim": 24, "n_heads": 2, "seq_classif_dropout": 0.3})
    assert (config.hidden_size, config.num_attention_heads, config.classifier_dropout) == (24, 2, 0.3)
    assert BertConfig.from_dict({"model_type": "distilbert", "hidden_size": 24}).to_dict()["dim"] == 24  # an alias
    changed = config.changed(hidden_dropout_prob=0.0, qa_dropout=0.2).changed(n_layers=1)
    assert {"dropout": 0.0, "qa_dropout": 0.2, "n_layers": 1, "dim": 24}.items() <= changed.to_dict().items()
    assert changed.num_hidden_layers == 1 and not {"hidden_size", "type_vocab_size"} & changed.to_dict().keys()
    with pytest.raises(ValueError, match="dim is 24 and hidden_size, which means the same, is 48"):
        BertConfig.from_dict({"model_type": "distilbert", "dim": 24, "hidden_size": 48})
    assert BertConfig(model_type="albert", embedding_size=None).to_dict()["embedding_size"] == 4096
    assert dataclasses.replace(config, vocab_size=9).to_dict() == config.to_dict() | {"vocab_size": 9}


def test_json_round_trip_keeps_unknown_fields(tmp_path):
    values = {**transformers.BertConfig(hidden_size=48, num_attention_heads=4).to_dict(), "my_note": [1, 2]}
    values = json.loads(json.dumps(values))
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = BertConfig.from_pretrained(tmp_path)
    assert config.hidden_size == 48 and {n: config.to_dict()[n] for n in values} == values


def test_null_fields_mean_the_default():
    nothing = {"is_decoder": None, "position_embedding_type": None, "add_cross_attention": None}
    assert dataclasses.replace(BertConfig.from_dict(nothing), extra={}) == BertConfig()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"hidden_size": "big"}', "\xff\xfe"])
def test_a_bad_config_file_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError):
        BertConfig.from_pretrained(tmp_path)


def test_label_names_give_the_number_of_labels():
    """As in transformers' configurations; a number that contradicts them is refused."""
    names = {0: "neg", 1: "neu", 2: "pos"}
    assert BertConfig().changed(id2label=names).num_labels == 3
    assert BertConfig().changed(label2id={"a": 0}).num_labels == 1
    numbered = BertConfig(id2label=names).changed(label2id={"no": 1, "yes": 0})
    assert numbered.id2label == {0: "yes", 1: "no"} == BertConfig(label2id={"no": 1, "yes": 0}).id2label
    written = BertConfig(id2label={0: "a"}, label2id={"a": 0}).changed(id2label=names).to_dict()
    assert written["label2id"] == {"neg": 0, "neu": 1, "pos": 2} and written["id2label"] == names
    for wrong in ({"a": 1}, {"a": 0, "b": 0}, {"a": "0"}, ["a"]):
        with pytest.raises(ValueError, match="label2id is .*; expected a dictionary of numbers, from 0 on"):
            BertConfig(label2id=wrong)
    for label2id, count, found in (
        ({"no": 1, "yes": 0}, 2, ["yes", "no"]),
        ({"no": 1, "yes": 0}, 3, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ({"no": "1", "yes": "0"}, 2, ["LABEL_0", "LABEL_1"]),  # transformers writes what it is given
        (["no"], 2, ["LABEL_0", "LABEL_1"]),
    ):
        read = BertConfig.from_dict({"label2id": label2id, "num_labels": count})
        assert list(read.id2label.values()) == found and read.changed(hidden_size=24).num_labels == count
    aliases = {"a": 0, "b": 1, "B": 1}
    assert BertConfig(id2label={0: "a", 1: "b"}, label2id=aliases).to_dict()["label2id"] == aliases
    named = BertConfig().changed(id2label=names)
    assert named.changed(hidden_size=48, num_attention_heads=4).extra["id2label"] == names
    assert "id2label" not in named.changed(num_labels=2).extra
    with pytest.raises(ValueError, match="id2label has 3 labels; expected num_labels, 2"):
        BertConfig().changed(id2label=names, num_labels=2)


def test_label_names_are_read_as_in_transformers():
    names = {0: "neg", 1: "neu", 2: "pos"}
    config = BertConfig(id2label=names, label2id={name: number for number, name in names.items()})
    theirs = transformers.BertConfig(**config.to_dict())
    assert config.num_labels == 3 and (config.id2label, config.label2id) == (theirs.id2label, theirs.label2id)
    assert BertConfig(num_labels=3).id2label == transformers.BertConfig(num_labels=3).id2label
    with pytest.raises(ValueError, match="id2label is .* by numbers below num_labels"):
        BertConfig(id2label=names, num_labels=2)


def test_one_class_alone_is_no_classification():
    """The loss would always be 0; transformers refuses it too."""
    with pytest.raises(ValueError, match="problem_type is 'single_label_classification'; expected another for num_lab"):
        BertConfig(num_labels=1, problem_type="single_label_classification")


@pytest.mark.parametrize(
    "make",
    [fastbert.BertModel, fastbert.BertEncoder, fastbert.BertForMaskedLM, fastbert.AutoModelForMaskedLM.from_config],
)
def test_another_library_s_configuration_is_named(make):
    with pytest.raises(TypeError, match=r"config is a transformers\.BertConfig; expected a fastbert\.BertConfig"):
        make(transformers.BertConfig())


def test_another_library_s_model_is_named():
    with pytest.raises(TypeError, match="state_dict: model is a transformers.BertModel; expected a model of fastbert"):
        fastbert.hf.state_dict(transformers.BertModel(transformers.BertConfig(**SMALL.to_dict())))


# ---- what config.json leaves out, or says in a form of its own


@pytest.mark.parametrize(
    "name", ["BertModel", "RobertaForMaskedLM", "XLMRobertaModel", "TFDistilBertModel", "MPNetModel"]
)
def test_architectures_tell_the_family_where_model_type_is_missing(name):
    config = BertConfig.from_dict({"architectures": [name], "pad_token_id": 1})
    assert config.family.classes == max(
        (family.classes for family in BY_MODEL_TYPE.values() if family.classes in name), key=len
    )


def test_other_architectures_are_not_taken_for_bert():
    with pytest.raises(ValueError, match="there is no model_type, and the architecture is GPT2Model"):
        BertConfig.from_dict({"architectures": ["GPT2Model"]})
    assert BertConfig.from_dict({}).model_type == "bert"  # Google's own checkpoints of 2018 have neither


@pytest.mark.parametrize("names", [["a", "b"], {"x": "a"}, {"0": 1}, {"2": "a"}, {-1: "a"}])
def test_names_of_labels_that_are_none_are_refused(names):
    with pytest.raises(ValueError, match=r"id2label is .*; expected a dictionary of names by numbers below num_labels"):
        BertConfig.from_dict({"id2label": names, "num_labels": 2})


def test_copies_share_nothing_that_can_change():
    config = BertConfig(extra={"mine": {"a": [1]}})
    config.changed(num_hidden_layers=1).extra["mine"]["a"].append(2)
    assert config.extra["mine"] == {"a": [1]}


def test_the_configuration_of_an_interrupted_save_is_that_of_the_weights(tmp_path, monkeypatch):
    BertModel(SMALL).save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("fastbert.checkpoint.write_text", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            BertModel(SMALL.changed(num_attention_heads=2)).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="saving was interrupted"):
        assert BertConfig.from_pretrained(tmp_path).num_attention_heads == 2


SMALL = BertConfig(
    vocab_size=9,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=8,
    max_position_embeddings=8,
)
