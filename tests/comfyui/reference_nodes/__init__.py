"""A test-only node pack: ComfyUI's own models over tiny diffusers weights, random inputs, interference and probes.

It is linked into a test server's custom_nodes; nothing of it is part of the product.
"""

from . import (
    inputs,
    interference,
    probes,
    reference_file,
    reference_flux,
    reference_qwen,
    reference_text,
    reference_vae,
    reference_video_vae,
    reference_wan,
    video,
    wrappers,
)

NODE_CLASS_MAPPINGS = {
    **reference_file.NODES,
    **reference_flux.NODES,
    **reference_qwen.NODES,
    **reference_text.NODES,
    **reference_vae.NODES,
    **reference_video_vae.NODES,
    **reference_wan.NODES,
    **video.NODES,
    **inputs.NODES,
    **interference.NODES,
    **probes.NODES,
    **wrappers.NODES,
}
