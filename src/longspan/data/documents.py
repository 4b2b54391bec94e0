"""Documents of a corpus: which files it has, and the UTF-8 text of each document in them.

A document is `bytes` that are known to be valid UTF-8. The suffix of a file decides how it is read: `.jsonl`
and `.ndjson` hold one document a line, `.parquet` one a row, and every other file is one document of text.
"""

import glob
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from longspan.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Source = str | os.PathLike | Sequence[str | os.PathLike]
STDLIB = "stdlib"
_HIDDEN = (".",)
# Installed packages, and files that the interpreter's build wrote: they differ from machine to machine.
_NOT_STDLIB = (*_HIDDEN, "site-packages", "dist-packages", "_sysconfigdata", "config-")


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus.

    Args:
        path: where it is.
        skip_undecodable: the file is passed over, not refused, when it is not UTF-8.
    """

    path: Path
    skip_undecodable: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the file; a DataError if it is gone."""
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise _unreadable(self.path, error) from error


def find_files(source: Source) -> list[SourceFile]:
    """Files of a corpus, in the order in which their documents are numbered, none of them twice.

    Args:
        source: "stdlib" for the running interpreter's own Python sources; a file; a folder, searched at every
            depth for files that are not hidden; a glob such as "notes/**/*.md"; or a sequence of those.

    Raises:
        DataError: nothing is there, or the interpreter was installed without sources.
    """
    sources = [source] if isinstance(source, str | os.PathLike) else source
    files: dict[Path, SourceFile] = {}
    for one in sources:
        for file in _stdlib_files() if one == STDLIB else _files_at(os.fspath(one)):
            files.setdefault(file.path.resolve(), file)
    if not files:
        raise DataError(f"data source {source!r} names nothing; give a file, a folder, a glob or {STDLIB!r}")
    return list(files.values())


def read_texts(file: SourceFile, text_field: str = "text") -> Iterator[bytes | None]:
    """Text of each document of a file, as valid UTF-8; None stands for a document that was passed over.

    Args:
        file: what to read, one document at a time (Parquet: one batch of rows at a time).
        text_field: key (JSONL) or column (Parquet) that holds the text.

    Raises:
        DataError: the file cannot be read or a document in it is broken; names the file, the line or row, and
            the fix.
    """
    readers = {".jsonl": _jsonl_texts, ".ndjson": _jsonl_texts, ".parquet": _parquet_texts}
    read = readers.get(file.path.suffix.lower())
    try:
        yield from read(file.path, text_field) if read else _whole_text(file)
    except OSError as error:
        raise _unreadable(file.path, error) from error


def _stdlib_files() -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _walk(root, _NOT_STDLIB) if path.suffix == ".py"]
    if not paths:
        raise DataError(
            f"no Python sources under {root}; install them, or set data.source to a file or folder"
        )
    return [SourceFile(path, skip_undecodable=True) for path in paths]


def _files_at(source: str) -> list[SourceFile]:
    path = Path(source)
    if path.is_dir():
        paths, otherwise = _walk(path, _HIDDEN), "has no files"
    elif path.exists():
        paths, otherwise = [path], ""
    else:
        names = glob.glob(source, recursive=True)
        paths, otherwise = sorted(Path(name) for name in names if os.path.isfile(name)), "does not exist"
    if not paths:
        raise DataError(f"data source {source!r} {otherwise}; give a file, a folder, a glob or {STDLIB!r}")
    return [SourceFile(path) for path in paths]


def _walk(root: Path, skipped: tuple[str, ...]) -> list[Path]:
    """Files at every depth in the order of their paths, without names that start with one of `skipped`."""

    def refuse(error: OSError) -> NoReturn:
        raise _unreadable(error.filename, error) from error

    found = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(skipped)]
        found += [Path(folder, name) for name in names if not name.startswith(skipped)]
    return sorted(found, key=lambda path: path.parts)


def _whole_text(file: SourceFile) -> Iterator[bytes | None]:
    if file.path.suffix.lower() == ".json":
        raise DataError(
            f"{file.path}: .json may be one document or many; rename it .txt or .jsonl, or leave it out"
        )
    data = file.path.read_bytes()
    try:
        yield _checked_utf8(data, file.path, first_line=1)
    except DataError:
        if not file.skip_undecodable:
            raise
        yield None


def _jsonl_texts(path: Path, text_field: str) -> Iterator[bytes]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_text(_checked_utf8(line, path, number), text_field, f"{path}:{number}")


def _json_text(line: bytes, text_field: str, where: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}); write one JSON object a line") from error
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: JSON {type(record).__name__}; write an object with the field {text_field!r}"
        )
    if text_field not in record:
        raise DataError(f"{where}: no field {text_field!r}; set data.text_field to one of {list(record)[:8]}")
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: {text_field!r} is {type(text).__name__}; make it a string or remove the line"
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {text_field!r} has half a surrogate pair; remove it from the text"
        ) from error


def _parquet_texts(path: Path, text_field: str) -> Iterator[bytes]:
    # Here, because pyarrow takes longer to load than the default corpus.
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as table:
            _check_column(table.schema_arrow, text_field, path)
            for batch in table.iter_batches(columns=[text_field], batch_size=1024):
                # Arrow does not check UTF-8 when it reads; as binary, a bad string reaches our check.
                for text in batch.column(0).cast(pa.large_binary()).to_pylist():
                    row += 1
                    if text is None:
                        raise DataError(
                            f"{path}: row {row}: {text_field!r} is null; fill it in or remove the row"
                        )
                    yield _checked_utf8(text, f"{path}: row {row}")
    except pa.ArrowException as error:
        raise DataError(
            f"{path}: not a readable Parquet file ({_one_line(error)}); write it again"
        ) from error


def _check_column(schema: "pa.Schema", text_field: str, path: Path) -> None:
    if text_field not in schema.names:
        raise DataError(f"{path}: no column {text_field!r}; set data.text_field to one of {schema.names[:8]}")
    kind = str(schema.field(text_field).type)
    if kind not in ("string", "large_string"):
        raise DataError(
            f"{path}: column {text_field!r} is {kind}; cast it to string or choose another column"
        )


def _checked_utf8(data: bytes, where: object, first_line: int | None = None) -> bytes:
    """`data`, if it is valid UTF-8; an error names its line when that of its first byte is given."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        newlines = data.count(b"\n", 0, error.start)
        line = "" if first_line is None else f":{first_line + newlines}"
        raise DataError(
            f"{where}{line}: invalid UTF-8 ({error.reason}, byte 0x{data[error.start]:02x}); "
            "convert it to UTF-8 or leave it out of data.source"
        ) from error
    return data


def _unreadable(path: object, error: OSError) -> DataError:
    reason = error.strerror or _one_line(error)
    return DataError(f"{path}: cannot be read ({reason}); check the file and its permissions")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
