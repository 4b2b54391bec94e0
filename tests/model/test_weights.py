"""Weights to and from Hugging Face folders, and into plain and sharded decoders."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from longspan.errors import DataError, UnsupportedError
from longspan.model import Decoder, HfWeights, InitialWeights, full_tensors, load_hf, materialise, save_hf
from longspan.spec.model import ModelSpec
from tests.model.families import CONFIGS, hf_logits, hf_model, our_logits

TOKENS_T = torch.arange(40) % 61
HEAD, TABLE, UP = "lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"


def stored(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8))
        for name in left
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama as transformers saves it."""
    hf_model(CONFIGS["llama2"]).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replace, add or (None) drop tensors of a single-file folder; `__` stands for a dot."""
    kept = load_file(folder / "model.safetensors") | {
        name.replace("__", "."): t for name, t in tensors.items()
    }
    save_file(
        {name: tensor for name, tensor in kept.items() if tensor is not None}, folder / "model.safetensors"
    )


@pytest.mark.parametrize("max_bytes", [10**9, 20_000], ids=["single", "indexed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama2", "tied", "qwen3-windows", "biases"])
def test_round_trip_is_bit_exact(tmp_path: Path, case: str, dtype: torch.dtype, max_bytes: int) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    hf_model(CONFIGS[case], dtype).save_pretrained(theirs, max_shard_size=max_bytes)
    spec = ModelSpec.from_hf(theirs)
    save_hf(ours, spec, load_hf(theirs).items(), max_file_bytes=max_bytes)
    assert same_bits(stored(ours), stored(theirs))
    assert (ours / "model.safetensors.index.json").is_file() == (max_bytes < 10**9)
    here, there = (
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager") for path in (ours, theirs)
    )
    assert here.dtype == there.dtype == dtype
    assert torch.equal(hf_logits(here, TOKENS_T), hf_logits(there, TOKENS_T))


@pytest.mark.parametrize("case", CONFIGS)
def test_a_saved_decoder_loads_in_transformers(tmp_path: Path, case: str) -> None:
    spec = ModelSpec.from_hf(CONFIGS[case])
    decoder = Decoder(spec)
    materialise(decoder, InitialWeights(spec.with_changes(initializer_range=0.15), seed=1))
    save_hf(tmp_path, spec, full_tensors(decoder))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert (hf_logits(model, TOKENS_T) - our_logits(decoder, TOKENS_T)).abs().max() <= 1e-5


def test_saving_again_leaves_no_file_of_the_former_form(folder: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in load_hf(folder).items()}
    save_hf(folder, ModelSpec.from_hf(folder), weights.items(), max_file_bytes=20_000)
    assert not (folder / "model.safetensors").exists()
    assert same_bits(dict(load_hf(folder)), weights)
    save_hf(folder, ModelSpec.from_hf(folder), weights.items())
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]
    assert same_bits(dict(load_hf(folder)), weights)


def test_files_follow_the_umask(tmp_path: Path) -> None:
    """Shared folders stay readable for others, which safetensors by itself does not let them be."""
    spec = ModelSpec.from_hf(CONFIGS["llama2"])
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            save_hf(tmp_path / oct(mask), spec, InitialWeights(spec, 0).items())
        finally:
            os.umask(before)
        found = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / oct(mask)).iterdir()}
        assert found == {mode}


def test_reads_only_what_is_asked_for(tmp_path: Path) -> None:
    hf_model(CONFIGS["llama2"]).save_pretrained(tmp_path, max_shard_size=20_000)
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    weights = load_hf(tmp_path)
    assert places[UP] != places[TABLE]
    (tmp_path / places[UP]).unlink()
    assert weights["embed_tokens.weight"].shape == (61, 32)


def test_a_tied_head_may_be_stored_twice_if_it_is_equal(tmp_path: Path) -> None:
    hf_model(CONFIGS["tied"]).save_pretrained(tmp_path)
    table_VE = load_file(tmp_path / "model.safetensors")[TABLE]
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    change(tmp_path, lm_head__weight=table_VE.clone())
    assert "lm_head.weight" not in load_hf(tmp_path)
    change(tmp_path, lm_head__weight=table_VE + 1)
    with pytest.raises(DataError, match="lm_head.weight differs"):
        load_hf(tmp_path)


def test_misfits_are_named_in_one_error(folder: Path) -> None:
    change(
        folder,
        **{
            "lm_head__weight": None,
            "model__norm__weight": torch.ones(31),
            "model__layers__9__mlp__up_proj__weight": torch.ones(1),
            "model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4),
        },
    )
    with pytest.raises(DataError) as caught:
        load_hf(folder)
    message = str(caught.value)
    assert "missing lm_head.weight" in message
    assert "unexpected model.layers.9.mlp.up_proj.weight" in message
    assert "misshaped model.norm.weight (31,), not (32,)" in message
    assert "inv_freq" not in message and "\n" not in message


def test_many_misfits_are_counted(folder: Path) -> None:
    with pytest.raises(DataError, match=r"unexpected model.layers.1[^;]* and 13 more"):
        HfWeights(folder, ModelSpec.from_hf(folder).with_changes(num_layers=1))


def test_unreadable_folders_are_data_errors(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(DataError, match="neither model.safetensors nor"):
        load_hf(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    for broken in (whole[:100], whole[:-100], b""):
        (tmp_path / "model.safetensors").write_bytes(broken)
        with pytest.raises(DataError, match="cannot read .*model.safetensors"):
            load_hf(tmp_path)
    index: Any
    for index in ("{", "[]", '{"weight_map": {"lm_head.weight": "gone.safetensors"}}'):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(DataError, match="cannot read .*(index.json|gone.safetensors)"):
            load_hf(tmp_path)


def test_an_index_that_points_to_the_wrong_file_is_missing_tensors(tmp_path: Path) -> None:
    hf_model(CONFIGS["llama2"]).save_pretrained(tmp_path, max_shard_size=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"][UP] = index["weight_map"][TABLE]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=f"missing {UP}"):
        load_hf(tmp_path)


def test_saving_refuses_other_tensors_than_the_models(tmp_path: Path, folder: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in load_hf(folder).items()}
    spec = ModelSpec.from_hf(folder)
    wrong = [
        (weights | {"norm.weight": torch.ones(3)}, r"unexpected norm.weight \(3,\)"),
        (weights | {"extra": torch.ones(3)}, "unexpected extra"),
        ({name: weights[name] for name in weights if name != "norm.weight"}, "missing norm.weight"),
    ]
    for tensors, words in wrong:
        with pytest.raises(DataError, match=words):
            save_hf(tmp_path / "wrong", spec, tensors.items())
        assert list((tmp_path / "wrong").iterdir()) == []
    gpt2 = ModelSpec(
        family="gpt2", num_layers=1, hidden_size=8, intermediate_size=8, num_heads=1, vocab_size=5
    )
    with pytest.raises(UnsupportedError, match="gpt2"):
        HfWeights(folder, gpt2)


def test_materialise_casts_and_takes_a_prefix_of_the_layers(folder: Path) -> None:
    weights = load_hf(folder)
    decoder = Decoder(weights.spec.with_changes(num_layers=1), torch.float64)
    materialise(decoder, weights)
    for name, whole in full_tensors(decoder):
        assert torch.equal(whole, weights[name].double())
