"""Tokenizers of the library `tokenizers`, read from a checkpoint or trained, and saved for `transformers` to read.

Three kinds, with the special tokens and templates of their families: WordPiece as in BERT (`[CLS] a [SEP] b [SEP]`,
token types 0 and 1), byte-level BPE as in RoBERTa (`<s> a </s></s> b </s>`, all 0), and SentencePiece's unigrams as in
DeBERTa-v3 (BERT's template), which can be read but not trained.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert import hub
from fastbert.config import BertConfig
from fastbert.files import write_text
from fastbert.warn import warn

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

# Special tokens by the names that transformers has for them, in the order of their ids.
SPECIAL_TOKENS = {
    "wordpiece": {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    },
    "byte-level-bpe": {
        "cls_token": "<s>",
        "pad_token": "<pad>",
        "sep_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    },
}

SPECIAL_TOKENS["unigram"] = SPECIAL_TOKENS["wordpiece"]

# Values of `tokenizer_class`, with or without "Fast", that fit each kind of vocabulary file.
_CLASSES = {
    "wordpiece": ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"),
    "byte-level-bpe": ("RobertaTokenizer",),
    "unigram": ("DebertaV2Tokenizer",),
}
_TRAINED = ("wordpiece", "byte-level-bpe")  # kinds that `train_tokenizer` can train
_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")  # allowed with any vocabulary


# ---- from files


def get_tokenizer(source: str | Path | Iterable[str | Path]) -> "Tokenizer":
    """Reads a `tokenizers.Tokenizer` from a Hugging Face directory, from files of one, or by a model's name on the hub.

    source: a directory, a name (`fastbert.hub`), a file, or several files. The first that exists of these is read:
    tokenizer.json (without its truncation and padding; normalised as tokenizer_config.json says if that names one of
    BERT's classes), vocab.txt (WordPiece), vocab.json with merges.txt (byte-level
    BPE), and spm.model (SentencePiece's unigrams, as in DeBERTa-v3; needs the extra `sentencepiece`). All but the first
    follow tokenizer_config.json (do_lower_case, strip_accents, tokenize_chinese_chars; add_prefix_space, trim_offsets;
    split_by_punct; special and added tokens), with the defaults of `transformers`. Names of given files may have a
    prefix (`bert-base-uncased-vocab.txt`). Texts are normalised as spm.model says, which transformers 5 does not do.
    Raises FileNotFoundError; ImportError without SentencePiece; ValueError for a damaged file, a missing special token,
    and a tokenizer_class that splits texts differently (BertJapaneseTokenizer).
    """
    files = _Files(source)
    config = files.config()
    if path := files.get("tokenizer.json"):
        from tokenizers import Tokenizer

        tokenizer = _read(path, lambda: Tokenizer.from_file(str(path)))
        _follow_config(tokenizer, config)
    elif path := files.get("vocab.txt"):
        tokenizer = _from_vocab_txt(path, config)
    elif (path := files.get("vocab.json")) and (merges := files.get("merges.txt")):
        tokenizer = _from_merges(path, merges, config)
    elif path := files.get("spm.model"):
        tokenizer = _from_sentencepiece(path, config)
    else:
        expected = "no tokenizer.json, vocab.txt or spm.model, and not both vocab.json and merges.txt"
        raise FileNotFoundError(f"{files} has {expected}")
    if "left" in (config.get("truncation_side"), ((tokenizer.truncation or {}).get("direction") or "").lower()):
        warn(f"{files}: truncation_side is left; texts that are too long are cut at their ends")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _follow_config(tokenizer: "Tokenizer", config: dict[str, Any]) -> None:
    """Normalises as tokenizer_config.json says if it names one of BERT's classes: transformers builds their normaliser
    anew, whatever tokenizer.json holds."""
    from tokenizers import normalizers

    named = (config.get("tokenizer_class") or "").removesuffix("Fast") in _CLASSES["wordpiece"]
    if named and isinstance(tokenizer.normalizer, normalizers.BertNormalizer):
        tokenizer.normalizer = normalizers.BertNormalizer(**_normalization(config))


def _normalization(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "lowercase": config.get("do_lower_case", True),
        "strip_accents": config.get("strip_accents"),
        "handle_chinese_chars": config.get("tokenize_chinese_chars", True),
    }


class _Files:
    """Finds files: in a directory by their names, among single files by the ends of their names."""

    def __init__(self, source: str | Path | Iterable[str | Path]) -> None:
        if isinstance(source, (str, Path)):
            source = [source if source and Path(source).exists() else hub.directory_of(source, weights=False)]
        given = [Path(path) for path in source]
        for path in given:
            if not path.exists():
                raise FileNotFoundError(f"there is no {path}")
        self.in_directory = len(given) == 1 and given[0].is_dir()
        self.paths = sorted(given[0].iterdir()) if self.in_directory else given
        self.name = ", ".join(map(str, given)) or "an empty list"

    def __str__(self) -> str:
        return self.name

    def get(self, name: str) -> Path | None:
        found = (path for path in self.paths if path.name == name or not self.in_directory and path.name.endswith(name))
        return next(found, None)

    def config(self) -> dict[str, Any]:
        """tokenizer_config.json, with fields that it lacks taken from older files and from config.json."""
        of_model = {"tokenizer_class": self._json("config.json").get("tokenizer_class")}
        values = self._json("special_tokens_map.json") | self._json("tokenizer_config.json")
        added = {index: {"content": token} for token, index in self._json("added_tokens.json").items()}
        return {"added_tokens_decoder": added} | of_model | values

    def _json(self, name: str) -> dict[str, Any]:
        path = self.get(name)
        return _read(path, lambda: dict(json.loads(path.read_text(encoding="utf-8")))) if path else {}


def _read(path: Path, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not what its name says: {error}") from error


def _from_vocab_txt(path: Path, config: dict[str, Any]) -> "Tokenizer":
    from tokenizers import models

    lines = _read(path, lambda: path.read_text(encoding="utf-8").removesuffix("\n").split("\n"))
    vocabulary = {line: index for index, line in enumerate(lines)}
    _check_class(path, "wordpiece", config)
    special = _special_tokens("wordpiece", config)
    tokenizer = _wordpiece(
        models.WordPiece(vocabulary, unk_token=special["unk_token"].content), **_normalization(config)
    )
    _add_tokens(tokenizer, path, special, config)
    return _with_template(tokenizer, special)


def _from_merges(path: Path, merges: Path, config: dict[str, Any]) -> "Tokenizer":
    from tokenizers import models

    model = _read(path, lambda: models.BPE(*models.BPE.read_file(str(path), str(merges))))
    _check_class(path, "byte-level-bpe", config)
    special = _special_tokens("byte-level-bpe", config)
    tokenizer = _byte_level_bpe(model, add_prefix_space=config.get("add_prefix_space", False))
    _add_tokens(tokenizer, path, special, config)
    return _with_roberta_template(tokenizer, special, config.get("trim_offsets", True))


def _from_sentencepiece(path: Path, config: dict[str, Any]) -> "Tokenizer":
    """Makes a tokenizer of SentencePiece's unigrams. [MASK], which is not in such a file, comes after its pieces."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    spm = _sentencepiece_model(path)
    _check_class(path, "unigram", config)
    special, pieces = _special_tokens("unigram", config), [(piece.piece, piece.score) for piece in spm.pieces]
    tokenizer = Tokenizer(models.Unigram(pieces, spm.trainer_spec.unk_id, spm.trainer_spec.byte_fallback))
    steps = [normalizers.Lowercase()] * bool(config.get("do_lower_case"))
    if charsmap := spm.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(charsmap))
    if spm.normalizer_spec.remove_extra_whitespaces:
        steps += normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")
    prefix = "always" if spm.normalizer_spec.add_dummy_prefix else "never"
    splits = [pre_tokenizers.Punctuation("isolated")] * bool(config.get("split_by_punct"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.Metaspace(prepend_scheme=prefix)])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prefix)
    tokenizer.add_special_tokens([special["mask_token"]])
    _add_tokens(tokenizer, path, special, config)
    return _with_template(tokenizer, special)


def _sentencepiece_model(path: Path) -> Any:
    try:
        from sentencepiece import sentencepiece_model_pb2 as protobuf
    except ImportError as error:
        raise ImportError(f"{path} needs SentencePiece: pip install sentencepiece protobuf") from error
    model = protobuf.ModelProto()
    _read(path, lambda: model.ParseFromString(path.read_bytes()))
    if model.trainer_spec.model_type != protobuf.TrainerSpec.UNIGRAM or not model.pieces:
        raise ValueError(f"{path} holds no unigram model; expected one, as DeBERTa-v3 has it")
    return model


def _check_class(path: Path, kind: str, config: dict[str, Any]) -> None:
    """Raises ValueError for the files of another tokenizer class, which may have the same names."""
    given = config.get("tokenizer_class")
    if given and given.removesuffix("Fast") not in (*_CLASSES[kind], *_GENERIC):
        expected = ", ".join(_CLASSES[kind])
        raise ValueError(f"{path} is of a {given}; expected one of {expected}, or a tokenizer.json beside it")


def _special_tokens(kind: str, config: dict[str, Any]) -> dict[str, "AddedToken"]:
    """Special tokens by transformers' names, from the configuration or else the family's."""
    return {role: _added_token(config.get(role) or name, role, kind) for role, name in SPECIAL_TOKENS[kind].items()}


def _added_token(given: str | dict[str, Any], role: str = "", kind: str = "") -> "AddedToken":
    from tokenizers import AddedToken

    fields = {"content": given} if isinstance(given, str) else {k: v for k, v in given.items() if k != "__type"}
    # RoBERTa's mask includes the space before it, because a word is predicted with its space.
    with_space = (role, kind) == ("mask_token", "byte-level-bpe")
    return AddedToken(**{"lstrip": with_space, "normalized": not role, "special": bool(role)} | fields)


def _add_tokens(tokenizer: "Tokenizer", path: Path, special: dict[str, "AddedToken"], config: dict[str, Any]) -> None:
    """Adds the configuration's added tokens, which must get the ids given there, then the special tokens, which must
    be in the vocabulary by then."""
    for index, fields in sorted(config["added_tokens_decoder"].items(), key=lambda item: int(item[0])):
        token = _added_token(fields)
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != int(index):
            raise ValueError(
                f"{path}: the added token {token.content!r} gets the id {tokenizer.token_to_id(token.content)}; "
                f"expected {index}, as the configuration says"
            )
    for role, token in special.items():
        if tokenizer.token_to_id(token.content) is None:
            raise ValueError(f"{path} has no {token.content!r}; expected the {role} there")
    tokenizer.add_special_tokens(list(special.values()))


# ---- the kinds


def _wordpiece(model: Any, *, lowercase: bool, strip_accents: bool | None = None, handle_chinese_chars: bool = True):
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=handle_chinese_chars, strip_accents=strip_accents, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _with_template(tokenizer: "Tokenizer", special: dict[str, "AddedToken"]) -> "Tokenizer":
    from tokenizers import processors

    cls, sep = special["cls_token"].content, special["sep_token"].content
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (cls, sep)],
    )
    return tokenizer


def _byte_level_bpe(model: Any, *, lowercase: bool = False, add_prefix_space: bool = False) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    tokenizer = Tokenizer(model)
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _with_roberta_template(
    tokenizer: "Tokenizer", special: dict[str, "AddedToken"], trim_offsets: bool = True
) -> "Tokenizer":
    from tokenizers import processors

    sep, cls = (special[role].content for role in ("sep_token", "cls_token"))
    prefixed = tokenizer.pre_tokenizer.add_prefix_space
    ends = ((token, tokenizer.token_to_id(token)) for token in (sep, cls))
    tokenizer.post_processor = processors.RobertaProcessing(*ends, trim_offsets, prefixed)
    return tokenizer


# ---- trained


def train_tokenizer(
    texts: Iterable[str],
    kind: str = "wordpiece",
    *,
    vocab_size: int = 30522,
    lowercase: bool | None = None,
    min_frequency: int = 2,
) -> "Tokenizer":
    """Trains a `tokenizers.Tokenizer` on a corpus; `save_tokenizer` writes it. The same texts give the same vocabulary.

    texts: strings, read once (`read_texts` reads files). kind: "wordpiece" or "byte-level-bpe". vocab_size: includes
    the special tokens; a small corpus gives fewer. lowercase: None means yes for WordPiece, no for BPE. min_frequency:
    how often two pieces must occur side by side to be merged. A model for the tokenizer needs
    `BertConfig(vocab_size=tokenizer.get_vocab_size(), pad_token_id=tokenizer.token_to_id("[PAD]"))`; "<pad>" for BPE.
    Raises ValueError for an unknown kind, no text, and a vocab_size smaller than the alphabet; TypeError for texts that
    are not strings.
    """
    if kind not in _TRAINED:
        raise ValueError(f"train_tokenizer: kind is {kind!r}; expected one of {', '.join(map(repr, _TRAINED))}")
    if vocab_size < 1 or min_frequency < 1:
        raise ValueError(
            f"train_tokenizer: vocab_size is {vocab_size}, min_frequency is {min_frequency}; expected numbers above 0"
        )
    lowercase = kind == "wordpiece" if lowercase is None else lowercase
    special = _special_tokens(kind, {})
    limits = {"vocab_size": vocab_size, "min_frequency": min_frequency, "show_progress": False}
    seen = Counted(strings("train_tokenizer", "texts", texts))
    train = _trained_wordpiece if kind == "wordpiece" else _trained_byte_level_bpe
    tokenizer = train(seen, lowercase, special, limits)
    if not seen.count:
        raise ValueError("train_tokenizer: texts is empty; expected at least one")
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(
            f"train_tokenizer: vocab_size is {vocab_size}; expected at least {tokenizer.get_vocab_size()}, for the "
            "special tokens and the alphabet of the texts"
        )
    return (_with_template if kind == "wordpiece" else _with_roberta_template)(tokenizer, special)


def _trained_wordpiece(
    texts: Iterable[str], lowercase: bool, special: dict[str, "AddedToken"], limits: dict[str, Any]
) -> "Tokenizer":
    """Trains a WordPiece, deterministically. The library gives ids to characters within words ("##a") in the random
    order of a hash table, and ids decide which of two equally frequent pairs is merged first. So words are counted
    first, and then these characters get fixed ids, as special tokens during the training only."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    unknown, words = special["unk_token"].content, _word_counts(texts, lowercase)
    inside = sorted({f"##{character}" for word in words for character in word[1:]})
    trainer = trainers.WordPieceTrainer(special_tokens=[*special.values(), *inside], **limits)
    counted = Tokenizer(models.WordPiece(unk_token=unknown))
    counted.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    counted.train_from_iterator(_repeated(words), trainer)
    tokenizer = _wordpiece(models.WordPiece(counted.get_vocab(), unk_token=unknown), lowercase=lowercase)
    tokenizer.add_special_tokens(list(special.values()))
    return tokenizer


def _word_counts(texts: Iterable[str], lowercase: bool) -> dict[str, int]:
    """How often each word occurs, read from the state of a trainer that counts words and, with vocab_size=1, hardly
    trains."""
    from tokenizers import models, trainers

    counter = trainers.WordPieceTrainer(vocab_size=1, show_progress=False)
    _wordpiece(models.WordPiece(), lowercase=lowercase).train_from_iterator(texts, counter)
    return json.loads(counter.__getstate__())["WordPieceTrainer"]["bpe_trainer"]["words"]


def _repeated(words: dict[str, int]) -> Iterator[str]:
    """Yields texts of at most 10,000 words, in which each word occurs as often as it was counted."""
    for word, count in words.items():
        for start in range(0, count, 10_000):
            yield f"{word} " * min(10_000, count - start)


def _trained_byte_level_bpe(
    texts: Iterable[str], lowercase: bool, special: dict[str, "AddedToken"], limits: dict[str, Any]
) -> "Tokenizer":
    from tokenizers import models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all bytes, so that no text has unknown tokens
    trainer = trainers.BpeTrainer(special_tokens=list(special.values()), initial_alphabet=alphabet, **limits)
    tokenizer = _byte_level_bpe(models.BPE(), lowercase=lowercase)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Counted:
    """Counts the items while iterating over them."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items, self.count = items, 0

    def __iter__(self):
        for item in self.items:
            self.count += 1
            yield item


def takes_token_types(directory: Path) -> bool:
    """Whether the tokenizer in a directory gives token types in transformers; also if it does not say."""
    names = _Files(directory).config().get("model_input_names")
    return names is None or "token_type_ids" in names


def save_tokenizer(
    tokenizer: Any, directory: str | Path, max_length: int | None = None, token_types: bool = True
) -> None:
    """Writes tokenizer.json and tokenizer_config.json, for `get_tokenizer` and `transformers.AutoTokenizer`.

    directory: created if missing; may be a model's. max_length: the length to which transformers cuts texts; None takes
    it from the tokenizer, if it is one of transformers, or else from the model in that directory. token_types: whether
    transformers gives them to the model.
    """
    directory, backend = Path(directory), copy_of(tokenizer)
    tokens = {
        role: getattr(tokenizer, role, None) or special_token(backend, role) for role in SPECIAL_TOKENS["wordpiece"]
    }
    names = {role: token for role, token in tokens.items() if token is not None}
    inputs = ["input_ids", *["token_type_ids"] * token_types, "attention_mask"]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs, **names}
    if (longest := max_length or _model_max_length(tokenizer, directory)) is not None:
        config["model_max_length"] = longest
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "tokenizer.json", backend.to_str(pretty=True))
    write_text(directory / "tokenizer_config.json", json.dumps(config, indent=2))


def _model_max_length(tokenizer: Any, directory: Path) -> int | None:
    given = getattr(tokenizer, "model_max_length", None)
    if given is not None and given < 1e20:  # larger values mean "unknown" in transformers
        return given
    try:
        return BertConfig.from_pretrained(directory).max_sequence_length
    except (FileNotFoundError, ValueError):  # no model there, or one that fastbert does not read
        return None


# ---- reading a tokenizer


def copy_of(tokenizer: Any) -> "Tokenizer":
    """A copy as a `tokenizers.Tokenizer`, without truncation and padding.

    tokenizer: from `tokenizers`, or one from `transformers` that is based on it. Raises TypeError for others.
    """
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        raise TypeError(f"tokenizer is a {type(tokenizer).__name__}; expected one of tokenizers, or based on it")
    tokenizer = Tokenizer.from_str(backend.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def special_token(tokenizer: Any, role: str) -> str | None:
    """The special token for a role ("mask_token", ...) in a `tokenizers.Tokenizer`, or None.

    A name that the tokenizer declares special goes before one that is only in its vocabulary: MPNet's holds BERT's
    [MASK] besides its own <mask>.
    """
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    names = (tokens[role] for tokens in SPECIAL_TOKENS.values())
    known = [name for name in names if tokenizer.token_to_id(name) is not None]
    return next((name for name in known if name in special), known[0] if known else None)


def special_token_id(tokenizer: Any, role: str) -> int | None:
    """The id of the special token for a role, in a tokenizer from `tokenizers` or `transformers`, or None."""
    if not hasattr(tokenizer, "token_to_id"):
        return getattr(tokenizer, f"{role}_id", None)
    token = special_token(tokenizer, role)
    return None if token is None else tokenizer.token_to_id(token)


def continuation_prefix(tokenizer: "Tokenizer") -> str | None:
    """The prefix of tokens that continue a word: `##` in a WordPiece, None in other models."""
    return getattr(tokenizer.model, "continuing_subword_prefix", None) or None


def check_tokenizer(tokenizer: Any, config: Any) -> None:
    """Raises ValueError if a tokenizer does not fit a model's configuration.

    Every id must be below config.vocab_size, and config.pad_token_id, whose embedding is not trained, must not be
    another token's id. config: a BertConfig, or one of `transformers`.
    """
    vocabulary = check_ids(tokenizer, config)
    pad, untrained = special_token_id(tokenizer, "pad_token"), getattr(config, "pad_token_id", None)
    names = [token for token, index in vocabulary.items() if index == untrained != pad]
    if names:
        raise ValueError(
            f"pad_token_id of the model is {untrained}, which is {names[0]!r} in the tokenizer; expected {pad}, its "
            "own padding (the embedding of pad_token_id is not trained)"
        )


def check_ids(tokenizer: Any, config: Any) -> dict[str, int]:
    """Returns a tokenizer's ids by token. Raises ValueError if one of them is not below config.vocab_size."""
    vocabulary = tokenizer.get_vocab()
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if largest >= config.vocab_size:
        raise ValueError(
            f"the tokenizer has {token!r} at {largest}; expected ids below the vocab_size of the model, "
            f"{config.vocab_size}"
        )
    return vocabulary


def strings(owner: str, name: str, texts: Iterable[str]) -> Iterator[str]:
    """Yields the texts. Raises as `text_of` does, and TypeError for a single string."""
    if isinstance(texts, (str, bytes, Mapping)):  # a mapping would be read as its keys
        raise TypeError(f"{owner}: {name} is a {type(texts).__name__}; expected several strings")
    for index, text in enumerate(texts):
        yield text_of(owner, f"{name}[{index}]", text)


def text_of(owner: str, name: str, text: Any, expected: str = "a string") -> str:
    """The text. Raises TypeError if it is not a string, ValueError for half a surrogate pair, which JSON allows."""
    if not isinstance(text, str):
        raise TypeError(f"{owner}: {name} is a {type(text).__name__}; expected {expected}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{owner}: {name} is not text at character {error.start}: {error.reason}") from None
    return text
