"""Every packed type of GGUF against the gguf package's own arithmetic: whole weights, some rows, some columns."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from parallel_core.errors import UserError
from parallel_core.gguf_header import GGUF_BLOCKS, parse_gguf
from parallel_core.worker.stored import StoredWeight, open_file

ROWS, COLUMNS = 6, 512

SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
"""Bytes of a block where its float16 scales are, where that is not its beginning."""


def random_blocks(kind: str) -> np.ndarray:
    """Random bytes but for the scales, so that no number is infinite."""
    numbers, size = GGUF_BLOCKS[kind]
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (ROWS * COLUMNS // numbers, size), dtype=np.uint8)
    double = kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    for place in SCALES.get(kind, (0, 2) if double else (0,)):
        scale = rng.uniform(0.01, 0.1, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_numbers_are_those_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    file, quant_type = tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind]
    packed = random_blocks(kind)
    writer = gguf.GGUFWriter(str(file), "flux")
    writer.add_tensor("first", np.ones(3, dtype=np.float32))
    writer.add_tensor("weight", packed, raw_dtype=quant_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = torch.from_numpy(gguf.quants.dequantize(packed, quant_type))
    assert expected.isfinite().all()
    with ExitStack() as stack:
        weight = StoredWeight(open_file(file, stack), parse_gguf(file).tensors["weight"])
        assert weight.get_shape() == [ROWS, COLUMNS]
        for index in (slice(None), slice(2, 5), (slice(None), slice(256, 512)), (slice(1, 3), slice(5, 300))):
            torch.testing.assert_close(weight[index], expected[index], rtol=1e-6, atol=1e-6)


def test_a_packed_weight_whose_shape_cuts_blocks_is_refused(tmp_path: Path) -> None:
    """The flattened rows are whole blocks, those of the weight itself are not."""
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(file), "wan")
    writer.add_array("comfy.gguf.orig_shape.weight", [6, 128, 2, 2])
    writer.add_tensor("weight", random_blocks("Q8_0"), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"\[6, 128, 2, 2\] of 'weight' does not fit its blocks of 32"):
        parse_gguf(file)
