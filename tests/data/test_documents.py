import json
import os
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longspan.data import STDLIB, Source, SourceFile, find_files, read_texts
from longspan.errors import DataError


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_parquet(path: Path, **columns: pa.Array) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def texts(source: Source, text_field: str = "text") -> list[bytes | None]:
    return [text for file in find_files(source) for text in read_texts(file, text_field)]


def test_stdlib_is_sorted_source_without_installed_packages():
    root = Path(sysconfig.get_path("stdlib"))
    paths = [file.path.relative_to(root) for file in find_files(STDLIB)]
    assert Path("asyncio/base_events.py") in paths
    assert paths == sorted(paths, key=lambda path: path.parts)
    assert {path.suffix for path in paths} == {".py"}
    assert not {"site-packages", "dist-packages"} & {path.parts[0] for path in paths}


def test_stdlib_passes_over_what_is_not_utf8(tmp_path, monkeypatch):
    write(tmp_path / "a.py", b"\xff\xfe")
    write(tmp_path / "b" / "c.py", "x = 1\n")
    write(tmp_path / "site-packages" / "d.py", "installed")
    write(tmp_path / "_sysconfigdata_here.py", "paths of this machine")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert texts(STDLIB) == [None, b"x = 1\n"]


def test_stdlib_without_sources_is_refused(tmp_path, monkeypatch):
    write(tmp_path / "os.pyc", b"")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="no Python sources under .*set data.source"):
        find_files(STDLIB)


def test_folder_gives_its_files_by_path_without_hidden_ones(tmp_path):
    for name in ("b.txt", "a/z.md", "a/b/c.rst", ".git/config", "a/.DS_Store"):
        write(tmp_path / name, name)
    assert texts(tmp_path) == [b"a/b/c.rst", b"a/z.md", b"b.txt"]


def test_list_of_paths_and_globs_keeps_its_order_and_repeats_nothing(tmp_path):
    for name in ("1.txt", "2.md", "sub/3.md"):
        write(tmp_path / name, name)
    source = [tmp_path / "2.md", str(tmp_path / "**" / "*.md"), str(tmp_path)]
    assert texts(source) == [b"2.md", b"sub/3.md", b"1.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    assert texts(write(tmp_path / "a[1].txt", "here")) == [b"here"]


@pytest.mark.parametrize("name", ["absent.txt", "absent/*.txt"])
def test_absent_source_is_named(tmp_path, name):
    with pytest.raises(
        DataError, match=r"absent.* does not exist; give a file, a folder, a glob or 'stdlib'"
    ):
        find_files(str(tmp_path / name))


def test_empty_folder_and_empty_list_are_refused(tmp_path):
    with pytest.raises(DataError, match="has no files"):
        find_files(tmp_path)
    with pytest.raises(DataError, match="names nothing"):
        find_files([])


def test_text_keeps_every_byte(tmp_path):
    content = "\ufeffline\r\n\tß\n\n".encode()
    assert texts(write(tmp_path / "a.txt", content)) == [content]


def test_jsonl_gives_one_document_a_line(tmp_path):
    lines = [{"text": "a\nb"}, {"text": "ü", "more": [1]}, {"text": ""}]
    content = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    assert texts(write(tmp_path / "a.jsonl", content)) == [b"a\nb", "ü".encode(), b""]
    assert texts(write(tmp_path / "b.ndjson", '{"body": "x"}'), "body") == [b"x"]


def test_parquet_gives_one_document_a_row(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", body=pa.array(["x", "ß" * 9]), id=pa.array([1, 2]))
    assert texts(path, "body") == [b"x", ("ß" * 9).encode()]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.txt", b"fine\nfine\n\xe9t\xe9", r"a\.txt:3: invalid UTF-8 .*0xe9.*convert it"),
        ("a.json", "{}", r"a\.json: .json may be one document or many; rename it"),
        ("a.jsonl", '{"text": "a"}\n{"text": ', r"a\.jsonl:2: not valid JSON .*write one JSON object a line"),
        ("a.jsonl", '{"text": "a"}\n\n["a"]', r"a\.jsonl:3: JSON list; write an object"),
        (
            "a.jsonl",
            '{"body": "a"}',
            r"a\.jsonl:1: no field 'text'; set data.text_field to one of \['body'\]",
        ),
        ("a.jsonl", '{"text": null}', r"a\.jsonl:1: 'text' is NoneType; make it a string"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', r"a\.jsonl:2: invalid UTF-8"),
        ("a.jsonl", r'{"text": "\ud800"}', r"a\.jsonl:1: 'text' has half a surrogate pair"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl:1: not valid JSON"),
        ("a.parquet", "not parquet", r"a\.parquet: not a readable Parquet file"),
    ],
)
def test_broken_file_is_refused_in_one_line_that_names_the_place(tmp_path, name, content, error):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=error) as caught:
        texts(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "error"),
    [
        ({"body": pa.array(["a"])}, r"no column 'text'; set data.text_field to one of \['body'\]"),
        ({"text": pa.array([1])}, "column 'text' is int64; cast it"),
        ({"text": pa.array(["a", None])}, "row 2: 'text' is null"),
        ({"text": pa.array([b"a", b"\xff"]).view(pa.string())}, "row 2: invalid UTF-8"),
    ],
    ids=["missing", "numbers", "null", "bytes"],
)
def test_broken_parquet_is_refused(tmp_path, column, error):
    with pytest.raises(DataError, match=rf"a\.parquet: {error}"):
        texts(write_parquet(tmp_path / "a.parquet", **column))


def test_truncated_parquet_is_refused_in_one_line(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", text=pa.array([str(i) * 50 for i in range(2000)]))
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet: ") as caught:
        texts(path)
    assert "\n" not in str(caught.value)


def test_unreadable_file_and_folder_are_refused(tmp_path, monkeypatch):
    missing = SourceFile(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"gone\.txt: cannot be read \(No such file"):
        list(read_texts(missing))
    with pytest.raises(DataError, match=r"gone\.txt: cannot be read"):
        _ = missing.num_bytes
    write(tmp_path / "sub" / "a.txt", "a")
    scan = os.scandir

    def deny(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", deny)
    with pytest.raises(DataError, match=r"sub: cannot be read \(Permission denied\)"):
        find_files(tmp_path)
