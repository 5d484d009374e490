"""The Distributed Sampler node: KSampler, with an account of what ran where."""

from __future__ import annotations

from typing import Any

import comfy.samplers
from comfy_api.latest import io

import nodes as comfy_nodes

from ..parallel_core.engine.transformer import RemoteTransformer
from ..parallel_core.max_memory import format_bytes
from .remote_patcher import remote_of
from .runtime import say

_MAX_SEED = 0xFFFFFFFFFFFFFFFF


def account(remote: RemoteTransformer) -> str:
    """What a finished run did: degrees, seconds per step, batches, peak memory per rank."""
    statistics = remote.statistics
    if statistics.choice is None:
        return "every step was served from a cache; nothing ran on the ranks"
    lines = [
        statistics.describe_choice(),
        f"{statistics.num_steps} evaluations, {statistics.seconds / statistics.num_steps:.2f} s each",
    ]
    if statistics.num_batches > 1:
        lines.append(f"the rows of one evaluation ran in {statistics.num_batches} waves")
    lines += [f"peak on {device}: {format_bytes(size)}" for device, size in statistics.peak_bytes.items()]
    return "\n".join(lines)


class DistributedSampler(io.ComfyNode):
    """PD_DistributedSampler."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """KSampler's own inputs under KSampler's own names."""
        return io.Schema(
            node_id="PD_DistributedSampler",
            display_name="Distributed Sampler",
            category="parallel",
            description="KSampler's inputs and result; shows what ran where, seconds per step and each rank's memory.",
            inputs=[
                io.Model.Input("model", tooltip="From Load Parallel Transformer. Any other MODEL runs as in KSampler."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=_MAX_SEED,
                    control_after_generate=True,
                    tooltip="The random seed of the noise.",
                ),
                io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Denoising steps."),
                io.Float.Input(
                    "cfg",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="Classifier-free guidance. Above 1 the negative prompt is evaluated too, "
                    "on another replica if there is one.",
                ),
                io.Combo.Input("sampler_name", options=comfy.samplers.KSampler.SAMPLERS, tooltip="The sampler."),
                io.Combo.Input("scheduler", options=comfy.samplers.KSampler.SCHEDULERS, tooltip="The noise schedule."),
                io.Conditioning.Input("positive", tooltip="What the picture shall show."),
                io.Conditioning.Input("negative", tooltip="What it shall not show; used when cfg is above 1."),
                io.Latent.Input("latent_image", tooltip="What to denoise. Its batch is shared out over replicas."),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="1 starts from noise; lower keeps more of latent_image.",
                ),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, sampler_name: Any = None, scheduler: Any = None) -> bool | str:
        """KSampler would quietly take another scheduler for one that it does not know."""
        choices = {"sampler_name": comfy.samplers.KSampler.SAMPLERS, "scheduler": comfy.samplers.KSampler.SCHEDULERS}
        for name, value in {"sampler_name": sampler_name, "scheduler": scheduler}.items():
            if value is not None and value not in choices[name]:
                return f"{name} is {value!r}; expected one of {', '.join(choices[name])}."
        return True

    @classmethod
    def execute(
        cls,
        model: Any,
        seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        positive: Any,
        negative: Any,
        latent_image: dict[str, Any],
        denoise: float,
    ) -> io.NodeOutput:
        """The denoised latent."""
        (latent,) = comfy_nodes.common_ksampler(
            model, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image, denoise=denoise
        )
        remote = remote_of(model.model)
        if remote is None:
            text = "This MODEL is an ordinary one, so nothing ran in parallel. Use Load Parallel Transformer."
        else:
            text = account(remote)
        say(text, cls.hidden.unique_id)
        return io.NodeOutput(latent)
