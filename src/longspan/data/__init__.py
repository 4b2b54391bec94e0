"""Documents to tokens, to packed rows, to the part of a batch that one rank computes.

The order of the data is a function of (seed, row number): nothing has to be saved, and every rank can derive
what any other rank sees. Everything is numpy until `shard` makes torch tensors.
"""

from longspan.data.batch import IGNORE, PADDING, PackedBatch
from longspan.data.buckets import POSITION_EDGES, bucket_names, position_buckets
from longspan.data.corpus import Corpus, CorpusReport, load_corpus
from longspan.data.documents import STDLIB, Source, SourceFile, find_files, read_texts
from longspan.data.loader import Batches, StepData
from longspan.data.local import LocalBatch, shard
from longspan.data.packing import ConcatenateAndCut, PackedRows, Packer, Pieces
from longspan.data.store import TokenStore, document_key, unigram_entropy
from longspan.data.tokenizer import AUTO, BYTES, ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "AUTO",
    "BYTES",
    "IGNORE",
    "PADDING",
    "POSITION_EDGES",
    "STDLIB",
    "Batches",
    "ByteTokenizer",
    "ConcatenateAndCut",
    "Corpus",
    "CorpusReport",
    "FileTokenizer",
    "LocalBatch",
    "PackedBatch",
    "PackedRows",
    "Packer",
    "Pieces",
    "Source",
    "SourceFile",
    "StepData",
    "TokenStore",
    "Tokenizer",
    "bucket_names",
    "document_key",
    "find_files",
    "load_corpus",
    "load_tokenizer",
    "position_buckets",
    "read_texts",
    "shard",
    "unigram_entropy",
]
