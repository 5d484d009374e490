"""Text encoders in slices over real ranks: the values of one process, equal shares, never the whole in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_core.errors import UserError
from parallel_core.families.text_registry import TEXT_FAMILIES
from parallel_core.text_source import read_text_source
from tests.ranks.gloo import run_on_ranks
from tests.tiny_text import build_t5, build_umt5, write_qwen_text, write_text, write_wan_text

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WRITE: dict[str, Any] = {"flux": write_text, "qwen-image": write_qwen_text, "wan": write_wan_text}
PROMPTS = ["seven dogs, painted", "", "one two three " * 40]


def four_heads(name: str, folder: Path, **options: Any) -> Path:
    """Tiny encoders whose heads four ranks can share."""
    sizes: dict[str, Any] = {"flux": {"clip": {"num_attention_heads": 4}}, "qwen-image": {"num_key_value_heads": 4}}
    return Path(WRITE[name](folder, **sizes.get(name, {}), **options))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: four_heads(name, root / name) for name in WRITE}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", WRITE)
def test_the_values_are_those_of_one_process(folders: dict[str, Path], family: str, ranks: int) -> None:
    results = run_on_ranks(
        ranks, "text_ranks:compare", place={"folder": str(folders[family])}, prompts=PROMPTS, length=64
    )
    for result in results:
        assert max(error for error, _ in result["errors"]) < 1e-5
        assert all(result["tensors"].values())
        assert result["bytes"] < result["whole"] * (1 / ranks + 0.3)
    assert len({result["sum"] for result in results}) == 1, "all ranks have the same bits"


@pytest.mark.parametrize("family", WRITE)
def test_bfloat16_is_as_near_to_float32_as_one_process(tmp_path: Path, family: str) -> None:
    folder = four_heads(family, tmp_path / "half", dtype=torch.bfloat16)
    (result, _) = run_on_ranks(2, "text_ranks:compare", place={"folder": str(folder)}, prompts=PROMPTS, length=64)
    for error, rounding in result["errors"]:
        assert error < 2 * rounding
    assert 0 < max(rounding for _, rounding in result["errors"])


@pytest.mark.parametrize("family", WRITE)
def test_the_ranks_really_need_each_other(folders: dict[str, Path], family: str) -> None:
    errors = run_on_ranks(2, "text_ranks:without_exchange", place={"folder": str(folders[family])}, prompt="seven dogs")
    assert min(errors) > 0.05


def test_clip_is_whole_where_its_heads_cannot_be_dealt_out(tmp_path: Path) -> None:
    folder = write_text(tmp_path / "flux", clip={"num_attention_heads": 2})
    source = read_text_source(folder, TEXT_FAMILIES)
    assert [part.label for part in source.divided_parts(2)] == ["CLIP", "T5"]
    assert [part.label for part in source.divided_parts(4)] == ["T5"]
    results = run_on_ranks(4, "text_ranks:compare", place={"folder": str(folder)}, prompts=PROMPTS[:1], length=64)
    assert max(error for error, _ in results[0]["errors"]) < 1e-5


@pytest.mark.parametrize(
    ("family", "ranks", "words"),
    [
        ("flux", 3, "over 3 ranks does not fit T5: num_heads 4, d_ff 64 cannot be dealt out equally. The nearest number"
         " of devices that works is 2;"),
        ("qwen-image", 8, "does not fit Qwen2.5-VL: num_attention_heads 4, num_key_value_heads 4 cannot be dealt out"),
        ("wan", 5, "nearest number of devices that works is 4"),
    ],
)  # fmt: skip
def test_counts_that_do_not_divide(folders: dict[str, Path], family: str, ranks: int, words: str) -> None:
    with pytest.raises(UserError) as error:
        read_text_source(folders[family], TEXT_FAMILIES).divided_parts(ranks)
    assert words in str(error.value)


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_a_rank_never_holds_more_than_its_slices_and_one_tensor(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """About 200 MB of T5 or UMT5, of which the largest tensor has 4 MB."""
    folder = four_heads(family, tmp_path / "large")
    build, name = (build_t5, "text_encoder_2") if family == "flux" else (build_umt5, "text_encoder")
    build(d_model=512, d_ff=2048, d_kv=64, num_heads=8, num_layers=12).save_pretrained(folder / name)
    results = run_on_ranks(2, "text_ranks:memory", place={"folder": str(folder)}, warm={"folder": str(folders[family])})
    largest = 512 * 2048 * 4
    for result in results:
        assert result["held"] > 90e6
        assert result["peak"] < result["held"] + 2 * largest + 4e6  # one tensor, and its slice beside it
        assert result["left"] < 5e6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("family", WRITE)
def test_slices_are_parked_and_come_back(folders: dict[str, Path], family: str, device: str) -> None:
    ranks = 2 if device == "cpu" else 1
    for result in run_on_ranks(
        ranks, "text_ranks:park_and_return", place={"folder": str(folders[family])}, device=device
    ):
        assert result == {"places": [["cpu"], [device]], "same": True}
