"""From a data source to token stores for training and evaluation."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from longspan.data.documents import STDLIB, Source, SourceFile, find_files, read_texts
from longspan.data.store import TokenStore, document_key, unigram_entropy
from longspan.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from longspan.errors import DataError

# Text that is tokenised in one go: enough for a tokenizer's threads, little beside the tokens.
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class CorpusReport:
    """What was loaded, for a person to read.

    Args:
        documents: number of documents kept.
        eval_documents: how many of them are for evaluation.
        tokens: number of tokens of all kept documents.
        skipped_undecodable: standard-library files that are not UTF-8.
        skipped_empty: documents without text, or of which the tokenizer makes no token.
        median_length: median tokens of a document.
        p99_length: tokens that 99 % of the documents do not exceed.
        max_length: tokens of the longest document.
        tokenizer: "bytes", or the path of the tokenizer.
        vocab_size: embedding rows that the tokenizer's ids need.
        unigram_entropy: loss in nats a token of the best model that ignores all context; None without targets.
    """

    documents: int
    eval_documents: int
    tokens: int
    skipped_undecodable: int
    skipped_empty: int
    median_length: int
    p99_length: int
    max_length: int
    tokenizer: str
    vocab_size: int
    unigram_entropy: float | None


class Corpus(NamedTuple):
    """Stores of the documents to train on and to evaluate on, and a report on both together."""

    train: TokenStore
    evaluation: TokenStore
    report: CorpusReport


def load_corpus(
    source: Source = STDLIB,
    *,
    tokenizer: str | os.PathLike | Tokenizer = BYTES,
    text_field: str = "text",
    eval_documents: float = 0.0,
    model_vocab_size: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Corpus:
    """Reads, tokenises and splits a corpus; the same on every rank, and prints nothing.

    Keeps 2 bytes a token (4 with more than 65,536 ids), and twice that while it loads.

    Args:
        source: see `find_files`.
        tokenizer: "bytes", the path of a `tokenizer.json`, or a tokenizer made by hand.
        text_field: key (JSONL) or column (Parquet) that holds the text.
        eval_documents: fraction of the documents for evaluation; see `TokenStore.split`.
        model_vocab_size: the model's vocabulary; None checks no token against it.
        on_progress: called now and then with (bytes of the source that are done, all of its bytes).

    Raises:
        DataError: the source or the tokenizer cannot be used, they make no document, or a token is not in the
            model's vocabulary.
    """
    encoder = load_tokenizer(tokenizer) if isinstance(tokenizer, str | os.PathLike) else tokenizer
    encoded = _encode(find_files(source), text_field, encoder, on_progress)
    if not encoded.documents:
        skipped = f"{encoded.empty} empty and {encoded.undecodable} undecodable ones were skipped"
        named = [source] if isinstance(source, str | os.PathLike) else source
        where = ", ".join(repr(str(path)) for path in named)
        raise DataError(f"data source {where} has no documents ({skipped}); choose one with text")
    store = TokenStore.from_documents(encoded.documents, encoded.keys)
    _check_vocabulary(store, encoder, model_vocab_size)
    train, evaluation = store.split(eval_documents)
    median, p99, longest = np.quantile(store.lengths, [0.5, 0.99, 1], method="nearest").tolist()
    report = CorpusReport(
        documents=store.num_documents,
        eval_documents=evaluation.num_documents,
        tokens=store.num_tokens,
        skipped_undecodable=encoded.undecodable,
        skipped_empty=encoded.empty,
        median_length=median,
        p99_length=p99,
        max_length=longest,
        tokenizer=encoder.name,
        vocab_size=encoder.vocab_size,
        unigram_entropy=unigram_entropy(store) if store.num_targets else None,
    )
    return Corpus(train, evaluation, report)


@dataclass
class _Encoded:
    documents: list[np.ndarray] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    undecodable: int = 0
    empty: int = 0


def _encode(
    files: list[SourceFile], text_field: str, tokenizer: Tokenizer, on_progress: Callable[[int, int], None]
) -> _Encoded:
    encoded = _Encoded()
    total_bytes = sum(file.num_bytes for file in files)
    for chunk, done_bytes in _chunks(files, text_field):
        texts = [text for text in chunk if text is not None]
        encoded.undecodable += len(chunk) - len(texts)
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            if text and len(ids):
                encoded.documents.append(ids)
                encoded.keys.append(document_key(text))
            else:
                encoded.empty += 1
        on_progress(done_bytes, total_bytes)
    return encoded


def _chunks(files: list[SourceFile], text_field: str) -> Iterator[tuple[list[bytes | None], int]]:
    """Texts of some documents at a time, and how many bytes of the files are read with them."""
    texts, texts_bytes, done_bytes = [], 0, 0
    for file in files:
        file_end = done_bytes + file.num_bytes
        for text in read_texts(file, text_field):
            texts.append(text)
            texts_bytes += len(text or b"")
            # Compressed text is longer than its file.
            done_bytes = min(done_bytes + len(text or b""), file_end)
            if texts_bytes >= _CHUNK_BYTES:
                yield texts, done_bytes
                texts, texts_bytes = [], 0
        done_bytes = file_end
    yield texts, done_bytes


def _check_vocabulary(store: TokenStore, tokenizer: Tokenizer, model_vocab_size: int | None) -> None:
    largest = int(store.tokens.max())
    if model_vocab_size is not None and largest >= model_vocab_size:
        raise DataError(
            f"wrong tokenizer: {tokenizer.name!r} (vocabulary {tokenizer.vocab_size}) gives id {largest} to "
            f"a model with a vocabulary of {model_vocab_size}; use the model's own tokenizer"
        )
