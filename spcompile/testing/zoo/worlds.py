"""Video models beyond the core ones: the Wan family, Mochi, Motif, SkyReels and Sana's videos and worlds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from spcompile.testing.zoo.common import (
    ATTN,
    CIN,
    COUT,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    PATCH,
    PIN,
    POOLED,
    ROPE3,
    TEXT,
    Size,
    mask,
    model,
    time,
)

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache


def _image(s: Size) -> int:
    """Number of tokens that an image encoder gives: 16 or 17."""
    return s.h + 12


@model("MochiTransformer3DModel", blocks=3)
def _mochi(s: Size):
    text = 56  # pooled by attention with 8 heads
    # the last block discards the text; pooled_projection_dim is the width of the text's stream
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=3, pooled_projection_dim=100, text_embed_dim=text,
        time_embed_dim=52,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, text),
        encoder_attention_mask=mask(s).bool(),
        timestep=time(s, 1000),
    )


@model("MotifVideoTransformer3DModel", blocks=6)
def _motifvideo(s: Size):
    # two dual blocks, two single ones, and two decoder blocks, which attend to the video twice over
    channels = 2 * CIN + 1  # noise, image condition and its mask
    config = dict(
        ATTN, in_channels=channels, out_channels=COUT, num_layers=2, num_single_layers=4, num_decoder_layers=2,
        text_embed_dim=TEXT, image_embed_dim=POOLED, rope_axes_dim=ROPE3,
        enable_text_cross_attention_dual=True, enable_text_cross_attention_single=True,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, channels, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=mask(s),
        image_embeds=randn(s.batch, _image(s), POOLED),
        timestep=time(s, 1000),
    )


@model("SkyReelsV2Transformer3DModel", blocks=2)
def _skyreels(s: Size):
    # Batch 1 is diffusion forcing: a time per frame, and the frame rate, which the class cannot take at batch 2.
    # Of many frames, each block of four sees itself and those before.  Batch 2 is plain text-to-video.
    forcing = s.batch == 1
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, text_dim=TEXT, ffn_dim=400, num_layers=2,
        inject_sample_info=forcing, num_frame_per_block=4 if s.frames % 4 == 0 else 1,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=1000 * torch.arange(1, s.frames + 1)[None] / 32 if forcing else time(s, 1000),
        enable_diffusion_forcing=forcing,
        fps=[1] if forcing else None,
    )


@model("WanVACETransformer3DModel", blocks=3)
def _wanvace(s: Size):
    # three blocks, and apart from them two control blocks, whose hints go to the first and the last
    control = 2 * CIN + 64  # inactive and reactive latents, and the mask of a patch of 8 x 8 pixels
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, text_dim=TEXT, ffn_dim=400, num_layers=3, vace_layers=[0, 2],
        vace_in_channels=control,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        control_hidden_states=randn(s.batch, control, s.frames, PATCH * s.h, PATCH * s.w),
        control_hidden_states_scale=torch.tensor([0.75, 1.25]),
        timestep=time(s, 1000),
    )


def _unscaled(module: Any) -> None:
    """Motion layers scale their weights by the fan-in themselves; scaled twice, a face would make no difference."""
    for layer in module.motion_encoder.modules():
        if hasattr(layer, "scale") and hasattr(layer, "weight"):
            layer.weight.data.div_(layer.scale)


@model("WanAnimateTransformer3DModel", blocks=4, prepare=_unscaled)
def _wananimate(s: Size):
    text = 512  # hard-coded in the class; what is before them is the image's
    faces = 4 * (s.frames - 2) + 1  # in pixel space; the first latent frame is the reference image
    # four blocks, of which the first and the third have a face adapter
    config = dict(
        ATTN, in_channels=2 * CIN + 4, latent_channels=CIN, out_channels=COUT, text_dim=TEXT, ffn_dim=400,
        num_layers=4, image_dim=POOLED, added_kv_proj_dim=ATTN["num_attention_heads"] * ATTN["attention_head_dim"],
        motion_encoder_size=8, motion_encoder_channel_sizes={"4": 18, "8": 14}, motion_style_dim=26, motion_dim=10,
        motion_encoder_dim=28, face_encoder_hidden_dim=30, inject_face_latents_blocks=2,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, 2 * CIN + 4, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, text, TEXT),
        encoder_hidden_states_image=randn(s.batch, _image(s), POOLED),
        pose_hidden_states=randn(s.batch, CIN, s.frames - 1, PATCH * s.h, PATCH * s.w),
        face_pixel_values=randn(s.batch, 3, faces, 8, 8),
        timestep=time(s, 1000),
    )


@model("SanaVideoTransformer3DModel", blocks=2, heads=8)
def _sanavideo(s: Size):
    # Linear attention divides by a sum of what relu leaves of a head: with a head dim of 8 that may be next to nothing.
    heads, head_dim = 8, 24
    config = dict(
        in_channels=CIN, out_channels=COUT, num_layers=2, num_attention_heads=heads, attention_head_dim=head_dim,
        num_cross_attention_heads=heads, cross_attention_head_dim=head_dim, cross_attention_dim=HIDDEN,
        caption_channels=TEXT,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=mask(s),
        timestep=time(s, 1000),
    )


# It casts to bfloat16 inside: a change of 1e-7 in its input moves its output by 2e-4.
@model("SanaWMTransformer3DModel", blocks=4, heads=8, tolerance=1e-3)
def _sanawm(s: Size):
    # Head dim 24: the camera's rotations want multiples of 8, and three axes of rope in half of it.
    # Two blocks of linear attention, two of softmax, which compute their attention in bfloat16.
    channels, plucker = 10, 48
    config = dict(
        in_channels=channels, num_layers=4, hidden_size=HIDDEN, num_attention_heads=8, softmax_every_n=2,
        linear_head_dim=24, caption_channels=TEXT, chunk_plucker_channels=plucker,
    )  # fmt: skip
    pose = torch.eye(4).repeat(s.batch, s.frames, 1, 1)
    pose[..., 2, 3] = torch.arange(s.frames) / 8  # forward, one step per frame
    lens = torch.tensor([s.w, s.h, s.w / 2, s.h / 2]).expand(s.batch, s.frames, 4)
    # the first frame is given, so its time is 0; the class rounds times down
    times = torch.tensor([64.0, 192.0])[: s.batch, None, None] * (torch.arange(s.frames) > 0)
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, channels, s.frames, s.h, s.w),
        encoder_hidden_states=randn(s.batch, 1, s.text, TEXT),
        mask=mask(s),
        timestep=times.clone(),
        camera_conditions=torch.cat([pose.flatten(2), lens], dim=-1),
        chunk_plucker=randn(s.batch, plucker, s.frames, s.h, s.w),
        data_info=dict(img_hw=torch.tensor([[32.0 * s.h, 32.0 * s.w]])),
    )


def _window(s: Size, randn: Callable) -> SanaWMRefinerKVCache:
    """What a block of new frames attends to besides itself: keys and values of one first and two recent frames."""
    from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache

    cache = SanaWMRefinerKVCache(2)
    cache.sink_pe = _split_rope(s, randn, s.hw)
    for layer in cache.layer_caches:
        layer.store_sink(randn(s.batch, s.hw, HIDDEN), randn(s.batch, s.hw, HIDDEN))
        layer.store_history(randn(s.batch, 2 * s.hw, HIDDEN), randn(s.batch, 2 * s.hw, HIDDEN))
    return cache


def _split_rope(s: Size, randn: Callable, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [batch, HEADS, length, HEAD_DIM / 2], at random angles."""
    angle = randn(1, HEADS, length, HEAD_DIM // 2).expand(s.batch, -1, -1, -1)
    return angle.cos(), angle.sin()


@model("SanaWMLTX2RefinerTransformer3DModel", blocks=2)
def _sanarefiner(s: Size):
    audio = 6  # the audio's layers are there, but the forward leaves them out
    config = dict(
        ATTN, in_channels=PIN, out_channels=4 * COUT, num_layers=2, cross_attention_dim=HIDDEN, caption_channels=TEXT,
        audio_num_attention_heads=HEADS, audio_attention_head_dim=audio, audio_cross_attention_dim=HEADS * audio,
        rope_type="split",
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.fhw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=mask(s),
        timestep=time(s, 1000)[:, None].repeat(1, s.fhw),
        video_rotary_emb=_split_rope(s, randn, s.fhw),
        kv_cache=_window(s, randn),
        kv_cache_mode="inject",
    )


@model("WanAnimate2Transformer3DModel", blocks=2)
def _wananimate2(s: Size):
    # The pass over the driving video, which fills the cache that the denoising steps then read by flex attention.
    clip = 1280  # hard-coded width of the image tokens
    config = dict(
        text_len=s.text, in_dim=2 * CIN + 4, dim=HIDDEN, ffn_dim=400, text_dim=TEXT, out_dim=COUT, num_heads=HEADS,
        num_layers=2,
    )  # fmt: skip
    grid = torch.tensor([[s.frames, s.h, s.w]] * s.batch)

    def inputs(randn: Callable) -> dict:
        from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

        size = (s.frames, PATCH * s.h, PATCH * s.w)
        return dict(
            hidden_states=[randn(CIN, *size) for _ in range(s.batch)],
            condition_latents=[randn(CIN + 4, *size) for _ in range(s.batch)],
            # texts come without their padding, the class adds it
            encoder_hidden_states=[randn(s.text - 1 - 3 * i, TEXT) for i in range(s.batch)],
            encoder_hidden_states_image=randn(s.batch, _image(s), clip),
            timestep=time(s, 1000),
            kv_cache=WanAnimate2KVCache(2),
            kv_cache_mode="extract",
            seq_len=s.fhw,
            offset_grid_sizes=grid.clone(),
        )

    return config, inputs
