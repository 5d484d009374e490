"""Trains the demo model that ships in example_models/pd-demo-digits: digits in coloured ink, asked for in words.

    python tools/train_demo_model.py --out DIR

writes a complete diffusers FluxPipeline folder (scheduler, two text encoders, two tokenizers, transformer, VAE) and,
beside it, DIR-sheet.png with samples. One thread, seeded; about 20 minutes on one core of a recent CPU. Needs
diffusers, transformers and scikit-learn; nothing is downloaded.

Data: scikit-learn's copy of the UCI ML hand-written digits data set ("Optical Recognition of Handwritten Digits",
E. Alpaydin and C. Kaynak, 1998, https://doi.org/10.24432/C50P49), licensed CC BY 4.0. It is drawn larger, in colour.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import numpy as np
import torch
from demo_model.autoencoder import build_autoencoder, train_autoencoder
from demo_model.denoiser import build_latent_sets, build_transformer, train_transformer
from demo_model.encoders import TextEncoders, build_encoders, train_encoders
from demo_model.judging import Judge, sampler_of, save_sheet
from demo_model.pictures import DigitPainter
from demo_model.prompts import COLOURS, DIGIT_WORDS
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

logger = logging.getLogger("train_demo_model")


def train_text(steps: int, seed: int) -> TextEncoders:
    """Both text encoders with their tokenizers; like every part, from nothing and from its own seed."""
    torch.manual_seed(seed)
    encoders = build_encoders()
    train_encoders(encoders, steps, seed)
    return encoders


def train_vae(steps: int, seed: int) -> AutoencoderKL:
    """The VAE."""
    torch.manual_seed(seed)
    vae = build_autoencoder()
    train_autoencoder(vae, DigitPainter(torch.Generator().manual_seed(seed)), steps, seed)
    return vae


def train_denoiser(encoders: TextEncoders, vae: AutoencoderKL, steps: int, seed: int) -> FluxTransformer2DModel:
    """The transformer, on top of the other parts."""
    torch.manual_seed(seed)
    latents = build_latent_sets(vae, DigitPainter(torch.Generator().manual_seed(seed + 1)))
    return train_transformer(build_transformer(), encoders, latents, steps, seed)


def assemble(encoders: TextEncoders, vae: AutoencoderKL, transformer: FluxTransformer2DModel) -> FluxPipeline:
    """The parts as one pipeline, with a scheduler whose sigmas are linear."""
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0, use_dynamic_shifting=False),
        vae=vae,
        text_encoder=encoders.clip,
        tokenizer=encoders.clip_tokenizer,
        text_encoder_2=encoders.t5,
        tokenizer_2=encoders.t5_tokenizer,
        transformer=transformer,
    )


def judge(pipeline: FluxPipeline, sheet: Path, steps: int, rounds: int) -> float:
    """Samples every digit ``rounds`` times, writes the sheet, returns the share whose digit and ink are as asked."""
    sample = sampler_of(pipeline, steps)
    examiner = Judge(DigitPainter(torch.Generator().manual_seed(1)))
    rows, right_digits, right_inks = [], [], []
    for round_ in range(rounds):
        inks = np.array([(digit + round_) % len(COLOURS) for digit in range(10)])
        prompts = [f"a {COLOURS[ink]} {word}" for ink, word in zip(inks, DIGIT_WORDS, strict=True)]
        images = sample(prompts, round_)
        right_digits.append(examiner.digits(images) == np.arange(10))
        right_inks.append(examiner.inks(images) == inks)
        rows.append(images)
    save_sheet(rows, str(sheet))
    digits, both = np.array(right_digits), np.array(right_digits) & np.array(right_inks)
    logger.info("digit as asked: %.1f %%, digit and ink: %.1f %%", 100 * digits.mean(), 100 * both.mean())
    logger.info("digit as asked, zero to nine: %s", digits.mean(axis=0).round(2).tolist())
    return float(both.mean())


def main() -> None:
    """Reads the command line, trains, saves and judges."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--encoder-steps", type=int, default=1000)
    parser.add_argument("--vae-steps", type=int, default=1600)
    parser.add_argument("--transformer-steps", type=int, default=8500)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    started = time.monotonic()
    encoders = train_text(arguments.encoder_steps, arguments.seed)
    vae = train_vae(arguments.vae_steps, arguments.seed)
    transformer = train_denoiser(encoders, vae, arguments.transformer_steps, arguments.seed)
    assemble(encoders, vae, transformer).save_pretrained(arguments.out)
    logger.info("trained in %.1f minutes", (time.monotonic() - started) / 60)
    loaded = FluxPipeline.from_pretrained(arguments.out, local_files_only=True)
    judge(loaded, arguments.out.with_name(arguments.out.name + "-sheet.png"), steps=20, rounds=10)


if __name__ == "__main__":
    main()
