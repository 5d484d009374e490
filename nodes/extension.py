"""The list of nodes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import routes
from .batch_conditioning import BatchConditioning
from .distributed_sampler import DistributedSampler
from .encode import EncodeOnDeviceMap
from .encode_files import EncodeFromFiles
from .load_transformer import LoadParallelTransformer
from .parallel_config import ParallelConfig
from .vae import LoadParallelVAE, VAEDecodeParallel


class ParallelDiffusionExtension(ComfyExtension):
    """All nodes of the package."""

    def __init__(self) -> None:
        routes.register()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Called by ComfyUI."""
        return [
            ParallelConfig,
            LoadParallelTransformer,
            EncodeOnDeviceMap,
            EncodeFromFiles,
            BatchConditioning,
            DistributedSampler,
            LoadParallelVAE,
            VAEDecodeParallel,
        ]
