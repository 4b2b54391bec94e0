"""A manifest knows when itself or any file beside it is not what was written."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from longspan.errors import CheckpointError
from longspan.train.checkpoint.manifest import Manifest, Progress, digest, read_manifest, verify_files

MANIFEST = Manifest(
    run_id="a", progress=Progress(3, 300, 1), world=2, model={"windows": [None, 3]}, config={}, corpus="c",
    versions={},
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weights").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "index").write_bytes(b"index")
    files = {name: digest(tmp_path / name) for name in ("weights", "index")}
    MANIFEST.with_files(files).write(tmp_path)
    return tmp_path


def verify(folder: Path) -> None:
    manifest = read_manifest(folder)
    verify_files(folder, manifest, manifest.files)


def test_what_was_written_is_read(folder: Path) -> None:
    verify(folder)
    assert read_manifest(folder).with_files({}) == MANIFEST


def flip(path: Path, at: int = 1000) -> None:
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: flip(folder / "weights"), "weights is damaged: its checksum differs"),
        (lambda folder: (folder / "weights").write_bytes(b"\0" * 10239), "it has 10239 bytes, not 10240"),
        (lambda folder: (folder / "index").write_bytes(b""), "index is damaged: it has 0 bytes, not 5"),
        (lambda folder: (folder / "index").unlink(), "index is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "is no complete checkpoint: it has no manifest"),
        (lambda folder: (folder / "manifest.json").write_bytes(b""), "manifest.json is damaged"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"[]"), "manifest.json is damaged"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff"), "manifest.json is damaged"),
    ],
    ids=["bit", "cut", "empty", "missing", "no manifest", "empty manifest", "list", "not text"],
)
def test_every_damage_is_named(folder: Path, damage: Callable[[Path], None], words: str) -> None:
    verify(folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=words):
        verify(folder)


def test_no_bit_of_a_manifest_can_flip_unseen(folder: Path) -> None:
    path = folder / "manifest.json"
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        flip(path, at)
        try:
            read = read_manifest(folder)
        except CheckpointError:
            pass
        else:
            # White space may change; what is said may not.
            assert read.with_files({}) == MANIFEST and chr(whole[at]).isspace()
        path.write_bytes(whole)


def test_another_format_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.train.checkpoint.manifest.FORMAT", 2)
    with pytest.raises(CheckpointError, match="another format than 2; use the Longspan that wrote it"):
        read_manifest(folder)


def test_a_manifest_names_only_files_of_its_folder(folder: Path) -> None:
    files = {"../weights": digest(folder / "weights")}
    MANIFEST.with_files(files).write(folder)
    with pytest.raises(CheckpointError, match="which is no file of its folder"):
        verify(folder)
    assert json.loads((folder / "manifest.json").read_text())["files"]


@pytest.mark.parametrize("change", [{"mood": "good"}, {"world": None}], ids=["more", "less"])
def test_fields_of_another_version_are_named(tmp_path: Path, change: dict) -> None:
    MANIFEST.with_files({}).write(tmp_path)
    body = json.loads((tmp_path / "manifest.json").read_text())
    del body["checksum"]
    body = {key: value for key, value in (body | change).items() if value is not None}
    told = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps({"checksum": told} | body))
    with pytest.raises(CheckpointError, match="cannot be used .*; use the Longspan that wrote it"):
        read_manifest(tmp_path)
