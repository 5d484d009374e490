"""Quantised files: held packed they compute the same bits as unpacked, under every plan that the table allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_core.errors import UserError
from parallel_core.model_file import ModelSource, read_transformer
from parallel_core.plan import RunMode
from parallel_core.storage import TORCHAO_CHOICES, Storage, choose_storage
from parallel_core.worker.loading import load_transformer
from tests.ranks.gloo import RankFailed, run_on_ranks
from tests.tiny_models import family_of

NAMES = ("flux", "qwen", "wan", "wan-i2v", "wan-5b")
LAYOUTS = ("original", "fp8", "fp8-e5m2", "old-scaled", "new-scaled", "gguf")
MODES: dict[str, dict[str, Any]] = {
    "1 rank": {"mode": {}},
    "ulysses 2": {"mode": {"ulysses": 2}},
    "ring 2": {"mode": {"ring": 2}},
    "tensor 2": {"mode": {"tensor": 2}},
    "ulysses 2 x tensor 2": {"mode": {"ulysses": 2, "tensor": 2}},
    "ulysses 2, shard_weights": {"mode": {"ulysses": 2}, "shard_weights": True},
    "ulysses 2 x tensor 2, shard_weights": {"mode": {"ulysses": 2, "tensor": 2}, "shard_weights": True},
    "ulysses 2, shard_weights in host memory": {"mode": {"ulysses": 2}, "shard_weights": True, "offload": True},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny models as folders and files."""
    root = tmp_path_factory.mktemp("stored")
    for name in NAMES:
        run_on_ranks(1, "stored_ranks:write_files", name=name, root=str(root), layouts=LAYOUTS)
    return root


def file_of(root: Path, name: str, layout: str) -> str:
    return str(root / f"{name}-{layout}.{'gguf' if layout == 'gguf' else 'safetensors'}")


def _cells() -> list[Any]:
    cells = []
    for name in NAMES:
        for layout in LAYOUTS[1:]:
            for mode in MODES:
                is_first = name == "flux" and layout in ("old-scaled", "gguf")
                chosen = mode in ("tensor 2", "ulysses 2, shard_weights") and layout in ("fp8", "new-scaled", "gguf")
                marks = () if is_first else (pytest.mark.slow,) if chosen else (pytest.mark.full,)
                cells.append(pytest.param(name, layout, mode, id=f"{name}-{layout}-{mode}", marks=marks))
    return cells


@pytest.mark.parametrize(("name", "layout", "mode"), _cells())
def test_packed_weights_compute_the_same_bits(root: Path, name: str, layout: str, mode: str) -> None:
    settings = MODES[mode]

    def run() -> list[Any]:
        return run_on_ranks(
            RunMode(**settings["mode"]).ranks_per_replica,
            "stored_ranks:compare_held",
            name=name,
            file=file_of(root, name, layout),
            weight_dtype="default",
            **settings,
        )

    if layout == "gguf" and name.startswith("wan") and "tensor" in settings["mode"]:  # 160 channels are 5 blocks of 32
        with pytest.raises(RankFailed, match="5 blocks of 32 numbers .* cannot be dealt to 2 ranks"):
            run()
        return
    for result in run():
        held, unpacked = result["packed"]
        assert held > 0 and unpacked == 0
        assert result["equal"]
        assert result["distance"] <= (0.05 if {"tensor", "ring"} & settings["mode"].keys() else 0)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("fp8_e4m3fn", mode) for mode in ("ulysses 2", "ring 2", "tensor 2", "ulysses 2, shard_weights")),
        ("fp8_e5m2", "tensor 2"),
        *((kind, mode) for kind in TORCHAO_CHOICES for mode in ("ulysses 2", "ring 2")),
    ],
)
def test_a_plain_file_can_be_held_in_8_bits(root: Path, mode: str, kind: str) -> None:
    settings = MODES[mode]
    ranks = run_on_ranks(
        2,
        "stored_ranks:compare_held",
        name="wan",
        file=file_of(root, "wan", "original"),
        weight_dtype=kind,
        **settings,
    )
    for result in ranks:
        assert not result["equal"]  # 8 bits are not what the file holds
        assert result["distance"] <= (0.05 if {"ring", "tensor"} & settings["mode"].keys() else 0)


@pytest.mark.parametrize("layout", ["new-scaled", "gguf"])
@pytest.mark.parametrize("name", ["flux", "qwen", "wan"])
def test_packed_weights_lie_anywhere(root: Path, name: str, layout: str) -> None:
    shares = {"cpu:0": 0.45, "cpu:1": 0.35, "cpu": 0.2, "disk": 2.0}
    (result,) = run_on_ranks(
        1, "stored_ranks:compare_placed", name=name, file=file_of(root, name, layout), shares=shares
    )
    assert result["equal"]
    assert {"cpu", "disk"} & {*result["homes"]}


@pytest.mark.parametrize(
    ("layout", "kind", "most"),
    [
        ("old-scaled", "default", 0.7),
        ("gguf", "default", 0.7),
        ("original", "fp8_e4m3fn", 0.7),
        ("original", "torchao_int8", 0.7),
        ("original", "torchao_fp8", 0.7),
    ],
)
def test_what_is_packed_takes_less_memory_and_can_be_parked(root: Path, layout: str, kind: str, most: float) -> None:
    (result,) = run_on_ranks(
        1, "stored_ranks:hold_and_park", name="flux", file=file_of(root, "flux", layout), weight_dtype=kind
    )
    assert result["bytes"] <= most * result["unpacked_bytes"]
    assert result["same"]
    assert 0 <= result["distance"] < 0.2


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf")])
def test_a_scale_that_means_nothing_is_refused(root: Path, tmp_path: Path, scale: float) -> None:
    weights = load_file(file_of(root, "flux", "old-scaled"))
    name = next(name for name in weights if name.endswith(".scale_weight"))
    weights[name] = torch.tensor(scale)
    file = tmp_path / "flux-old-scaled.safetensors"
    save_file(weights, file)
    with pytest.raises(UserError, match=f"scale '{name}' in '{file.name}'"):
        load_transformer(ModelSource(file, root / "flux"), family_of("flux"), Storage("float32"), torch.device("cpu"))


@pytest.mark.parametrize("kind", ["fp8_e4m3fn", "fp8_e5m2"])
def test_numbers_beyond_the_range_of_fp8_become_its_largest(root: Path, tmp_path: Path, kind: str) -> None:
    weights = load_file(file_of(root, "flux", "original"))
    name = "double_blocks.0.img_mlp.0.weight"
    weights[name][0, :2] = torch.tensor([1e6, -1e6])
    file = tmp_path / "flux-original.safetensors"
    save_file(weights, file)
    source = ModelSource(file, root / "flux")
    storage = choose_storage(read_transformer(source)[0], kind)
    model = load_transformer(source, family_of("flux"), storage, torch.device("cpu")).model
    made = model.get_submodule("transformer_blocks.0.ff.net.0.proj").unpacked()
    most = torch.finfo(getattr(torch, storage.kind)).max
    assert made[0, :2].tolist() == [most, -most]
    assert made.isfinite().all()
