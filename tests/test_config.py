import dataclasses
import json

import pytest
import torch
import transformers

from fastbert import BertConfig, BertModel


def test_defaults_are_hugging_face_s():
    theirs = transformers.BertConfig()
    for field in dataclasses.fields(BertConfig):
        if field.name != "extra":
            assert getattr(BertConfig(), field.name) == getattr(theirs, field.name), field.name


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
    ],
)
def test_nonsense_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        BertConfig(**fields)


def test_json_round_trip_keeps_unknown_fields(tmp_path):
    values = {**transformers.BertConfig(hidden_size=48, num_attention_heads=4).to_dict(), "my_note": [1, 2]}
    values = json.loads(json.dumps(values))
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = BertConfig.from_pretrained(tmp_path)
    assert config.hidden_size == 48 and {n: config.to_dict()[n] for n in values} == values


def test_null_fields_mean_the_default():
    BertConfig.from_dict({"is_decoder": None, "position_embedding_type": None, "add_cross_attention": None})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"hidden_size": "big"}', "\xff\xfe"])
def test_a_bad_config_file_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError):
        BertConfig.from_pretrained(tmp_path)
