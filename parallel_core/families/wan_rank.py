"""The rank's side of Wan: makes diffusers' WanTransformer3DModel compute what ComfyUI's WanModel computes.

Owns what differs between the two: where rotary positions and times come from, texts of any length beside an image, and
which parts run in float32. Imports diffusers only where a model is loaded. Knows neither ComfyUI nor plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, (1, tokens, 1, head width) each; neighbours in the last dimension are equal."""


def prepare(rows: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arguments of WanTransformer3DModel.forward. Times stay float32; see `set_up` for `attention_kwargs`."""
    rope = shared["rope"]
    return {
        "hidden_states": rows["x"],
        "timestep": _token_times(rows["times"].float(), rope.shape[0]),
        "encoder_hidden_states": rows["context"],
        "encoder_hidden_states_image": rows.get("clip_fea"),
        "attention_kwargs": {"rope": rope, "times": rows["times"].float()},
        "return_dict": False,
    }


def _token_times(times: Tensor, tokens: int) -> Tensor:
    """[B] or [B, frames] -> [B], or [B, tokens] where frames have times of their own.

    A frame's time holds for its tokens; what does not divide evenly is rounded up and cut, as ComfyUI does it.
    """
    if times.ndim == 1 or times.shape[1] == 1:
        return times.flatten()
    return times.repeat_interleave(-(-tokens // times.shape[1]), dim=1)[:, :tokens]


class _Call:
    """What the model was called with, for those of its parts that diffusers does not hand it to."""

    times: Tensor
    """The times of all rows, and of all frames where these have their own, rising."""
    rope: Tensor
    """(tokens, half a head, 2): cosines and sines."""
    image_tokens: int | None = None

    def remember(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward pre-hook of the model; it comes first, when times and tokens are still whole."""
        image = kwargs["encoder_hidden_states_image"]
        self.image_tokens = None if image is None else image.shape[1]
        given = kwargs["attention_kwargs"]
        self.times, self.rope = given["times"].flatten().sort().values, given["rope"]
        return args, {**kwargs, "attention_kwargs": None}

    def rotation(self, hidden_states: Tensor) -> Rotation:
        """In place of the `forward` of diffusers' `rope`, which knows neither scaled nor shifted positions."""
        cos, sin = self.rope[None, :, None].repeat_interleave(2, dim=3).unbind(-1)
        return cos, sin


def set_up(model: torch.nn.Module) -> None:
    """Changes a loaded WanTransformer3DModel; its modules, and so its weights' names and its plans, stay.

    The rotation comes with the call (`attention_kwargs`), since ComfyUI's nodes can scale and shift it. Weights that
    are held in float32 get float32 to work with.
    """
    from ..upstream import dispatch_attention

    call, parts = _Call(), cast(Any, model)
    model.register_forward_pre_hook(call.remember, with_kwargs=True)
    parts.rope.forward = call.rotation
    parts.patch_embedding.forward = _in_dtype_of_weight(parts.patch_embedding)
    parts.condition_embedder.forward = _embed_conditions(parts.condition_embedder, call)
    for block in parts.blocks:
        block.attn1.set_processor(WanAttention(dispatch_attention, call))
        block.attn2.set_processor(WanAttention(dispatch_attention, call))


def _in_dtype_of_weight(layer: Any) -> Callable[[Tensor], Tensor]:
    own = layer.forward

    def forward(tensor: Tensor) -> Tensor:
        result: Tensor = own(tensor.to(layer.weight.dtype)).to(tensor.dtype)
        return result

    return forward


def _embed_conditions(embedder: Any, call: _Call) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """The `forward` of diffusers' WanTimeTextImageEmbedding with ComfyUI's embedding of times.

    The times of rows and frames are embedded once, not those of every token that a video of the 5B model has, and
    every rank computes the same bits whichever tokens it holds.
    """
    channels = embedder.timesteps_proj.num_channels

    def forward(
        timestep: Tensor, text: Tensor, image: Tensor | None = None, timestep_seq_len: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        known = call.times.to(timestep.device)
        waves = sinusoids(known, channels).to(embedder.time_embedder.linear_1.weight.dtype)
        times = embedder.time_embedder(waves).type_as(text)
        modulation = embedder.time_proj(embedder.act_fn(times))
        index = torch.searchsorted(known, timestep)
        if timestep_seq_len is not None:
            index = index.unflatten(0, (-1, timestep_seq_len))
        image = None if image is None else _embed_image(embedder.image_embedder, image)
        return times[index], modulation[index], embedder.text_embedder(text), image

    return forward


def sinusoids(times: Tensor, channels: int) -> Tensor:
    """[N] -> [N, channels], float32: cosines, then sines, of the times at wavelengths of 2 pi to 2 pi 10000.

    The frequencies are computed as ComfyUI computes them: diffusers' differ in the last bit, which at time 1000 is
    1e-4 of a cosine.
    """
    half = channels // 2
    frequencies = torch.pow(10000, -torch.arange(half, dtype=torch.float32, device=times.device).div(half))
    angles = torch.outer(times.float(), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _embed_image(embedder: Any, image: Tensor) -> Tensor:
    """[B, tokens, C] of one image, or of a first and a last one in a row, -> [B, tokens, width].

    First-last-frame models have positions for the tokens of two images; one image alone takes the first ones.
    """
    positions = embedder.pos_embed
    if positions is not None:
        image = image[:, : positions.shape[1]]
        image = image + positions[:, : image.shape[1]].to(image.dtype)
    result: Tensor = embedder.norm2(embedder.ff(embedder.norm1(image)))
    return result


class WanAttention:
    """Wan's attention for texts of any length: diffusers' own takes all but the last 512 tokens for the image's.

    A model that reads images and was given none takes the text for the image as well, which is what ComfyUI does.
    """

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(self, dispatch: Callable[..., Tensor], call: _Call) -> None:
        self._dispatch = dispatch
        self._call = call

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        """(B, tokens, width) -> the same: tokens attend to one another, turned by `rotary_emb`, or to the states."""
        query = _heads(attn.norm_q(attn.to_q(hidden_states)), attn)
        if encoder_hidden_states is None:
            output = self._attend_to_video(attn, query, hidden_states, rotary_emb)
        elif attn.add_k_proj is None:
            output = self._attend_to_text(attn, query, encoder_hidden_states)
        else:
            output = self._attend_to_text(attn, query, encoder_hidden_states[:, self._call.image_tokens :])
            output = output + self._attend_to_image(attn, query, encoder_hidden_states[:, : self._call.image_tokens])
        result: Tensor = attn.to_out[1](attn.to_out[0](output.flatten(2, 3)))
        return result

    def _attend_to_video(self, attn: Any, query: Tensor, tokens: Tensor, rotation: Rotation) -> Tensor:
        """The one attention over tokens that may be shared out over ranks: all have the whole text and image."""
        key, value = attn.norm_k(attn.to_k(tokens)), attn.to_v(tokens)
        query, key = (_rotate(tensor, rotation) for tensor in (query, _heads(key, attn)))
        backend, parallel = self._attention_backend, self._parallel_config
        return self._dispatch(query, key, _heads(value, attn), backend=backend, parallel_config=parallel)

    def _attend_to_text(self, attn: Any, query: Tensor, tokens: Tensor) -> Tensor:
        key, value = attn.norm_k(attn.to_k(tokens)), attn.to_v(tokens)
        return self._dispatch(query, _heads(key, attn), _heads(value, attn), backend=self._attention_backend)

    def _attend_to_image(self, attn: Any, query: Tensor, tokens: Tensor) -> Tensor:
        key, value = attn.norm_added_k(attn.add_k_proj(tokens)), attn.add_v_proj(tokens)
        return self._dispatch(query, _heads(key, attn), _heads(value, attn), backend=self._attention_backend)


def _heads(tensor: Tensor, attn: Any) -> Tensor:
    """(B, tokens, width of this rank's heads) -> (B, tokens, heads, head width)."""
    split: Tensor = tensor.unflatten(2, (attn.heads, -1))
    return split


def _rotate(tensor: Tensor, rotation: Rotation) -> Tensor:
    """Turns each pair of neighbours in the last dimension by its angle, in float32."""
    cos, sin = (part[..., 0::2] for part in rotation)
    even, odd = tensor[..., 0::2], tensor[..., 1::2]
    turned = torch.empty_like(tensor)
    turned[..., 0::2] = even * cos - odd * sin
    turned[..., 1::2] = even * sin + odd * cos
    return turned
