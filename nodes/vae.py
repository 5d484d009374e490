"""The VAE nodes: Load Parallel VAE, and VAE Decode (Parallel)."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

import nodes as comfy_nodes

from ..parallel_core.engine.vae import RemoteVae, VaeModel
from ..parallel_core.errors import UserError
from ..parallel_core.plan import ParallelPlan
from ..parallel_core.vae_spec import DTYPES, TileSize, VaeSpec, read_vae
from .listing import find_model, list_models
from .parallel_config import ParallelConfigType, default_plan
from .remote_vae import RemoteVAE
from .remote_video_vae import RemoteVideoVAE
from .runtime import engine, say

_MAX_SIZE = 4096


def inspect_vae(model_name: str, dtype: str) -> VaeSpec:
    """The VAE of the chosen folder or file, checked from its config and headers."""
    return read_vae(find_model(model_name, "vae"), dtype)


def describe(spec: VaeModel) -> str:
    """For the node: what will run where."""
    ranks = "1 rank" if len(spec.devices) == 1 else f"{len(spec.devices)} ranks"
    return (
        f"{ranks} ({', '.join(spec.devices)}), each with the whole VAE\n"
        f"{spec.vae.num_bytes / 1e6:.0f} MB in {spec.vae.dtype}, {spec.vae.latent_channels} latent channels"
    )


class LoadParallelVAE(io.ComfyNode):
    """PD_LoadParallelVAE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="PD_LoadParallelVAE",
            display_name="Load Parallel VAE",
            category="parallel",
            description="Use it in place of Load VAE: decode and encode then run on several devices. "
            "All of ComfyUI's VAE nodes work with it.",
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=list_models("vae"),
                    tooltip="The VAE of FLUX, Stable Diffusion, Wan or Qwen-Image: a diffusers folder in "
                    "models/diffusers, a file in models/vae, or a whole checkpoint in models/checkpoints.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=list(DTYPES),
                    default="default",
                    optional=True,
                    tooltip="What the VAE is held and computed in. default: as in the file, but float32 where the file "
                    "is float16 and its config says that this overflows (SDXL).",
                ),
                ParallelConfigType.Input(
                    "parallel_config",
                    optional=True,
                    tooltip="From Parallel Config; only its devices matter here. Without it: all GPUs.",
                ),
            ],
            outputs=[io.Vae.Output(display_name="vae")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, model_name: Any = None) -> bool | str:
        """Checks the folder, its json and its headers before the prompt runs; None comes over a link."""
        try:
            if model_name is not None:
                inspect_vae(model_name, "default")
        except UserError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(
        cls, model_name: str, dtype: str = "default", parallel_config: ParallelPlan | None = None
    ) -> str:
        """Makes ComfyUI run the node again when the VAE's file was replaced."""
        return inspect_vae(model_name, dtype).fingerprint

    @classmethod
    def execute(
        cls, model_name: str, dtype: str = "default", parallel_config: ParallelPlan | None = None
    ) -> io.NodeOutput:
        """A VAE; the ranks start and load when it is first used."""
        plan = parallel_config or default_plan()
        spec = VaeModel(devices=plan.devices, vae=inspect_vae(model_name, dtype))
        say(describe(spec), cls.hidden.unique_id)
        remote = RemoteVae(engine=engine(), spec=spec)
        return io.NodeOutput(RemoteVideoVAE(remote) if spec.vae.is_video else RemoteVAE(remote))


class VAEDecodeParallel(io.ComfyNode):
    """PD_VAEDecode."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """VAEDecodeTiled's inputs under its names."""
        return io.Schema(
            node_id="PD_VAEDecode",
            display_name="VAE Decode (Parallel)",
            category="parallel",
            description="Decodes in tiles that are shared out over the devices of Load Parallel VAE and blended as "
            "diffusers does it.",
            inputs=[
                io.Latent.Input("samples", tooltip="The latent to decode."),
                io.Vae.Input("vae", tooltip="From Load Parallel VAE. Any other VAE decodes as in VAE Decode (Tiled)."),
                io.Int.Input(
                    "tile_size",
                    default=512,
                    min=64,
                    max=_MAX_SIZE,
                    step=32,
                    tooltip="Side of a tile in pixels. Smaller: more tiles to share out and less memory, but each sees "
                    "less of the picture.",
                ),
                io.Int.Input(
                    "overlap",
                    default=64,
                    min=0,
                    max=_MAX_SIZE,
                    step=32,
                    tooltip="Pixels that neighbouring tiles share and blend over; smaller than tile_size.",
                ),
                io.Int.Input(
                    "temporal_size",
                    default=64,
                    min=8,
                    max=_MAX_SIZE,
                    step=4,
                    optional=True,
                    tooltip="For video VAEs: frames in a tile. No effect on pictures.",
                ),
                io.Int.Input(
                    "temporal_overlap",
                    default=8,
                    min=4,
                    max=_MAX_SIZE,
                    step=4,
                    optional=True,
                    tooltip="For video VAEs: frames that neighbours share. No effect on pictures.",
                ),
            ],
            outputs=[io.Image.Output(display_name="image")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, tile_size: Any = None, overlap: Any = None) -> bool | str:
        """Refuses an overlap as large as the tile; values over links are None here and are checked in execute."""
        if tile_size is None or overlap is None:
            return True
        try:
            TileSize.from_pixels(tile_size, overlap, scale=1)
        except UserError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        samples: dict[str, Any],
        vae: Any,
        tile_size: int,
        overlap: int,
        temporal_size: int = 64,
        temporal_overlap: int = 8,
    ) -> io.NodeOutput:
        """The pictures."""
        if isinstance(vae, RemoteVAE) and not isinstance(vae, RemoteVideoVAE):
            tile = TileSize.from_pixels(tile_size, overlap, vae.upscale_ratio)
            return io.NodeOutput(
                vae.decode_tiled(samples["samples"], tile_x=tile.side, tile_y=tile.side, overlap=tile.overlap)
            )
        (images,) = comfy_nodes.VAEDecodeTiled().decode(
            vae, samples, tile_size, overlap, temporal_size, temporal_overlap
        )
        if not isinstance(vae, RemoteVAE):
            say("This VAE is an ordinary one, so nothing ran in parallel. Use Load Parallel VAE.", cls.hidden.unique_id)
        return io.NodeOutput(images)
