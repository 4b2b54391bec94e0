import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.data import BYTES, ByteTokenizer, FileTokenizer, load_tokenizer
from longspan.errors import DataError
from tests.data.examples import steady, write_tokenizer


@steady
@given(st.lists(st.text()))
def test_bytes_are_their_own_ids_with_one_more_at_the_end(texts):
    encoded = ByteTokenizer().encode_batch([text.encode() for text in texts])
    assert [bytes(ids[:-1].tolist()).decode() for ids in encoded] == texts
    assert all(ids[-1] == 256 and ids.dtype == np.uint16 for ids in encoded)


def test_load_tokenizer_knows_bytes_and_files(tmp_path):
    assert (load_tokenizer(BYTES).name, load_tokenizer(BYTES).vocab_size) == ("bytes", 257)
    path = write_tokenizer(tmp_path, {"a": 0, "b": 7})
    assert load_tokenizer(path).name == str(path)
    assert load_tokenizer(tmp_path).vocab_size == 8  # ids up to 7, gaps and all


@pytest.mark.parametrize(
    ("vocab", "end", "ids"),
    [
        ({"a": 0, "b": 1, "</s>": 2}, "auto", [0, 1, 2]),
        ({"a": 0, "b": 1, "</s>": 2, "<|endoftext|>": 3}, "auto", [0, 1, 3]),
        ({"a": 0, "b": 1}, "auto", [0, 1]),
        ({"a": 0, "b": 1, "</s>": 2}, None, [0, 1]),
        ({"a": 0, "b": 1, "</s>": 2}, "a", [0, 1, 0]),
        ({"a": 0, "b": 1, "</s>": 2}, "b", [0, 1]),
    ],
    ids=["usual", "more_specific", "none_defined", "none_wanted", "named", "there_already"],
)
def test_end_of_document(tmp_path, vocab, end, ids):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, vocab), end)
    assert tokenizer.encode_batch([b"a b"])[0].tolist() == ids


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    path = write_tokenizer(tmp_path, {"a": 0, "b": 1}, truncate=2)
    assert [ids.tolist() for ids in load_tokenizer(path).encode_batch([b"a b b b", b"b"])] == [
        [0, 1, 1, 1],
        [1],
    ]


def test_ids_beyond_16_bits_are_kept(tmp_path):
    path = write_tokenizer(tmp_path, {"a": 0, "b": 70_000})
    (ids,) = load_tokenizer(path).encode_batch([b"b a"])
    assert (ids.dtype, ids.tolist()) == (np.uint32, [70_000, 0])


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"absent\.json' does not exist; give a tokenizer.json or 'bytes'"):
        FileTokenizer(tmp_path / "absent.json")
    (tmp_path / "tokenizer.json").write_text('{"model_type": "llama",\n "vocab_size": 3}')
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer.json \(.*\); give one") as caught:
        FileTokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_absent_end_token_is_refused(tmp_path):
    with pytest.raises(DataError, match="no token '</s>' to end documents with"):
        load_tokenizer(write_tokenizer(tmp_path, {"a": 0}), "</s>")
