import json
import sysconfig

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longspan.data import CorpusReport, FileTokenizer, load_corpus, unigram_entropy
from longspan.errors import DataError
from tests.data.examples import write_tokenizer

TEXTS = ["one two", "", "three", "four four four"]


def write_corpus(folder, kind):
    if kind == "text":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text)
        return folder
    path = folder / f"corpus.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    else:
        pq.write_table(pa.table({"text": TEXTS}), path)
    return path


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_every_format_gives_the_same_store(tmp_path, kind, capfd):
    train, evaluation, report = load_corpus(write_corpus(tmp_path, kind), model_vocab_size=257)
    documents = [bytes(train.document(number)[:-1].tolist()) for number in range(train.num_documents)]
    assert documents == [b"one two", b"three", b"four four four"]
    assert evaluation.num_documents == 0
    assert report == CorpusReport(
        documents=3,
        eval_documents=0,
        tokens=8 + 6 + 15,
        skipped_undecodable=0,
        skipped_empty=1,
        median_length=8,
        p99_length=15,
        max_length=15,
        tokenizer="bytes",
        vocab_size=257,
        unigram_entropy=unigram_entropy(train),
    )
    assert capfd.readouterr() == ("", "")


def test_evaluation_documents_follow_the_text_not_the_place(tmp_path):
    sides = []
    for kind in ("text", "parquet"):
        folder = tmp_path / kind
        folder.mkdir()
        _, evaluation, report = load_corpus(write_corpus(folder, kind), eval_documents=0.3)
        assert report.eval_documents == evaluation.num_documents > 0
        sides.append(evaluation.tokens.tolist())
    assert sides[0] == sides[1]


def test_tokenizer_file(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "a b"}\n{"text": "  "}\n{"text": "b"}\n')
    path = write_tokenizer(tmp_path, {"a": 0, "b": 1})
    train, _, report = load_corpus(source, tokenizer=path)
    assert [train.document(number).tolist() for number in range(2)] == [[0, 1], [1]]
    assert (report.skipped_empty, report.tokenizer, report.vocab_size) == (1, str(path), 2)
    assert load_corpus(source, tokenizer=FileTokenizer(path, end="a")).train.num_tokens == 6


def test_wrong_tokenizer_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a b")
    path = write_tokenizer(tmp_path, {"a": 0, "b": 500})
    error = r"wrong tokenizer: '.*tokenizer.json' \(vocabulary 501\) gives id 500 to a model .* of 500"
    with pytest.raises(DataError, match=error):
        load_corpus(tmp_path / "a.txt", tokenizer=path, model_vocab_size=500)
    assert load_corpus(tmp_path / "a.txt", tokenizer=path, model_vocab_size=501).train.num_tokens == 2


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", ""), ("a.jsonl", "\n\n"), ("a.jsonl", '{"text": ""}')]
)
def test_corpus_without_documents_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match="has no documents .*choose one with text"):
        load_corpus(tmp_path / name)


def test_progress_rises_to_the_size_of_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr("longspan.data.corpus._CHUNK_BYTES", 40)
    source = write_corpus(tmp_path, "jsonl")
    calls = []
    load_corpus([source, source], on_progress=lambda *call: calls.append(call))
    pq.write_table(pa.table({"text": ["a" * 5000] * 50}), tmp_path / "small.parquet")
    load_corpus(tmp_path / "small.parquet", on_progress=lambda *call: calls.append(call))
    size, small = source.stat().st_size, (tmp_path / "small.parquet").stat().st_size
    assert calls[0] == (size, size)
    assert [total for _, total in calls[1:]] == [small] * 51
    assert all(0 < done <= small for done, _ in calls[1:]) and calls[-1] == (small, small)


def test_standard_library_files_that_are_not_utf8_are_counted(tmp_path, monkeypatch):
    for name, content in {"a.py": b"x = 1", "b.py": b"\xe9", "c.py": b"\xff"}.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    report = load_corpus().report
    assert (report.documents, report.skipped_undecodable, report.skipped_empty) == (1, 2, 0)


def test_standard_library_is_a_corpus_and_the_same_each_time():
    first, second = (load_corpus(eval_documents=0.02, model_vocab_size=257) for _ in range(2))
    assert first.report == second.report
    assert (first.train.tokens == second.train.tokens).all()
    assert first.report.documents > 500 and first.report.tokens > 5_000_000
    assert 0 < first.report.eval_documents < 0.1 * first.report.documents
    assert 2 < unigram_entropy(first.train) < 4
