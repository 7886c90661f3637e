"""From raw text to packed or padded batches.

Tokenizers, data sets, corpora in memory-mapped files, a collator that packs and masks, samplers by number of examples
or of tokens, and a loader that resumes in the middle of an epoch (docs/data.md)::

    loader = create_mlm_dataloader(texts, tokenizer, max_tokens=8192)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = model(**batch).loss  # fastbert.BertForMaskedLM, or another of its models

`transformers.Trainer` takes the data sets, and the collator as its `data_collator`; docs/heads.md shows how to give it
the samplers.
"""

from fastbert.data.collator import PackingCollator
from fastbert.data.contrastive import ContrastiveCollator, ContrastiveDataset, read_columns
from fastbert.data.corpus import TokenFile, write_tokens
from fastbert.data.datasets import (
    ClassificationDataset,
    MLMDataset,
    NSPDataset,
    QADataset,
    TokenClassificationDataset,
    align_labels,
)
from fastbert.data.filters import Filtered, by_length, by_letters, no_duplicates, no_near_duplicates
from fastbert.data.loader import (
    BatchLoader,
    create_classification_dataloader,
    create_dataloader,
    create_mlm_dataloader,
)
from fastbert.data.rows import read_texts
from fastbert.data.sampler import BatchSizeSampler, TokenBudgetSampler
from fastbert.data.tokenizer import check_tokenizer, get_tokenizer, save_tokenizer, train_tokenizer

__all__ = [
    "BatchLoader",
    "BatchSizeSampler",
    "ClassificationDataset",
    "ContrastiveCollator",
    "ContrastiveDataset",
    "Filtered",
    "MLMDataset",
    "NSPDataset",
    "PackingCollator",
    "QADataset",
    "TokenBudgetSampler",
    "TokenClassificationDataset",
    "TokenFile",
    "align_labels",
    "by_length",
    "by_letters",
    "check_tokenizer",
    "create_classification_dataloader",
    "create_dataloader",
    "create_mlm_dataloader",
    "get_tokenizer",
    "no_duplicates",
    "no_near_duplicates",
    "read_columns",
    "read_texts",
    "save_tokenizer",
    "train_tokenizer",
    "write_tokens",
]
