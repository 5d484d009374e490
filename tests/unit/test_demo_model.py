"""The demo model that ships in example_models: complete, small, offline, repeatable, and it draws what it is asked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from safetensors import safe_open
from sklearn.datasets import load_digits
from sklearn.svm import SVC

MODEL = Path(__file__).parents[2] / "example_models" / "pd-demo-digits"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture(scope="module")
def pipeline() -> FluxPipeline:
    loaded = FluxPipeline.from_pretrained(MODEL, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def draw(pipeline: FluxPipeline, prompts: list[str], *, steps: int, height: int = 64, width: int = 64) -> np.ndarray:
    """Pictures [n, height, width, 3] in 0..1."""
    result = pipeline(
        prompt=prompts,
        height=height,
        width=width,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(7),
        max_sequence_length=32,
        output_type="np",
    )
    return np.asarray(result.images)


def as_cells(pictures: np.ndarray) -> np.ndarray:
    """Pictures [n, 64, 64, 3] as load_digits stores them: [n, 64] cells of 0..16, 16 where there is ink.

    Ink of any colour is dark in at least one channel. A digit's 8x8 cells fill the middle 48 pixels.
    """
    ink = ((0.9 - pictures.min(axis=3)) / 0.8).clip(0, 1)[:, 8:56, 8:56]
    return ink.reshape(-1, 8, 6, 8, 6).mean(axis=(2, 4)).reshape(-1, 64) * 16


def test_the_folder_has_every_part_of_a_flux_pipeline_and_stays_small() -> None:
    parts = {name for name, value in json.loads((MODEL / "model_index.json").read_text()).items() if value[1:]}
    assert {"scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer", "vae"} <= parts
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in {".bin", ".pt", ".ckpt", ".pth"}]
    assert max(path.stat().st_size for path in files) < 4_000_000
    assert sum(path.stat().st_size for path in files) <= 6_000_000


def test_the_latents_are_on_the_scale_that_comfyui_fixes_for_flux() -> None:
    config = json.loads((MODEL / "vae" / "config.json").read_text())
    assert (config["scaling_factor"], config["shift_factor"]) == (0.3611, 0.1159)
    assert (config["latent_channels"], len(config["block_out_channels"])) == (16, 4)


def test_four_ranks_can_share_the_heads_and_the_weights_are_float32() -> None:
    config = json.loads((MODEL / "transformer" / "config.json").read_text())
    assert config["num_attention_heads"] % 4 == 0
    with safe_open(MODEL / "transformer" / "diffusion_pytorch_model.safetensors", framework="pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F32"}  # noqa: SIM118


def test_a_word_and_its_numeral_are_one_token_for_both_tokenizers(pipeline: FluxPipeline) -> None:
    for digit, word in enumerate(WORDS):
        for text in (word, str(digit)):
            assert len(pipeline.tokenizer(text).input_ids) == 3, text  # start, word, end
            assert len(pipeline.tokenizer_2(text).input_ids) == 2, text  # word, end


def test_it_draws_the_digits_that_it_is_asked_for(pipeline: FluxPipeline) -> None:
    reader = SVC().fit(load_digits().data, load_digits().target)
    pictures = draw(pipeline, [f"a blue {word}" for word in WORDS], steps=10)
    right = reader.predict(as_cells(pictures)) == np.arange(10)
    assert right.sum() >= 8, f"only {right.nonzero()[0].tolist()} look like what was asked for"


def test_it_draws_in_the_ink_that_it_is_asked_for(pipeline: FluxPipeline) -> None:
    pictures = draw(pipeline, ["a red three", "a green three", "a blue three"], steps=8)
    darkest = np.sort(pictures.min(axis=3).reshape(3, -1), axis=1)[:, 200, None, None]
    for channel, picture, level in zip(range(3), pictures, darkest, strict=True):
        assert picture[picture.min(axis=2) <= level].mean(axis=0).argmax() == channel


def test_the_same_seed_draws_the_same_picture_and_other_sizes_and_an_empty_prompt_work(pipeline: FluxPipeline) -> None:
    first = draw(pipeline, [""], steps=2, height=96, width=160)
    assert first.shape == (1, 96, 160, 3)
    assert np.isfinite(first).all()
    assert np.array_equal(first, draw(pipeline, [""], steps=2, height=96, width=160))
