"""The twelve models that the other tests rely on: images and videos, joint and cross attention."""

from __future__ import annotations

import torch

from spcompile.testing.zoo.common import (
    ATTN,
    CIN,
    COUT,
    HIDDEN,
    PATCH,
    PIN,
    POOLED,
    ROPE3,
    TEXT,
    Size,
    guidance,
    ids,
    mask,
    model,
    optional,
    rope,
    time,
)


@model("FluxTransformer2DModel", blocks=4)
def _flux(s: Size):
    config = dict(
        ATTN, in_channels=PIN, out_channels=4 * COUT, num_layers=2, num_single_layers=2, guidance_embeds=True,
        joint_attention_dim=TEXT, pooled_projection_dim=POOLED, axes_dims_rope=ROPE3,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        pooled_projections=randn(s.batch, POOLED),
        timestep=time(s),
        guidance=guidance(s),
        img_ids=ids(3, s.h, s.w),
        txt_ids=torch.zeros(s.text, 3),
    )


@model("Flux2Transformer2DModel", blocks=4)
def _flux2(s: Size):
    config = dict(
        ATTN, in_channels=PIN, out_channels=4 * COUT, num_layers=2, num_single_layers=2,
        joint_attention_dim=TEXT, axes_dims_rope=(2, 2, 2, 2),
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s),
        guidance=guidance(s),
        # ids carry a batch dimension, as from the pipeline: (t, h, w, text position)
        img_ids=ids(4, s.h, s.w, 1).expand(s.batch, -1, -1),
        txt_ids=ids(4, s.text).expand(s.batch, -1, -1),
    )


@model("WanTransformer3DModel", blocks=2)
def _wan(s: Size):
    config = dict(ATTN, in_channels=CIN, out_channels=COUT, text_dim=TEXT, ffn_dim=400, num_layers=2)
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s, 1000),
    )


@model("QwenImageTransformer2DModel", blocks=2)
def _qwenimage(s: Size):
    config = dict(
        ATTN, in_channels=PIN, out_channels=COUT, num_layers=2, joint_attention_dim=TEXT, axes_dims_rope=ROPE3
    )
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_hidden_states_mask=optional(mask(s)),
        timestep=time(s),
        img_shapes=[[(1, s.h, s.w)]] * s.batch,
    )


@model("SD3Transformer2DModel", blocks=3)
def _sd3(s: Size):
    # one block with a second, image-only attention (SD3.5), one plain, and the text-discarding last
    config = dict(
        ATTN, sample_size=26, patch_size=PATCH, in_channels=CIN, out_channels=COUT, num_layers=3,
        joint_attention_dim=TEXT, caption_projection_dim=HIDDEN, pooled_projection_dim=POOLED,
        pos_embed_max_size=12, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        pooled_projections=randn(s.batch, POOLED),
        timestep=time(s, 1000),
    )


@model("PixArtTransformer2DModel", blocks=2)
def _pixart(s: Size):
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=2, sample_size=26, patch_size=PATCH,
        cross_attention_dim=HIDDEN, caption_channels=TEXT,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=optional(mask(s)),
        timestep=time(s, 1000),
        added_cond_kwargs=dict(resolution=None, aspect_ratio=None),
    )


@model("CogVideoXTransformer3DModel", blocks=2)
def _cogvideox(s: Size):
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=2, time_embed_dim=52, text_embed_dim=TEXT,
        use_rotary_positional_embeddings=True,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.frames, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s, 1000),
        image_rotary_emb=rope(randn, s.fhw),
    )


@model("HunyuanVideoTransformer3DModel", blocks=4)
def _hunyuanvideo(s: Size):
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=2, num_single_layers=2, num_refiner_layers=2,
        text_embed_dim=TEXT, pooled_projection_dim=POOLED, rope_axes_dim=ROPE3,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=mask(s),
        pooled_projections=randn(s.batch, POOLED),
        timestep=time(s, 1000),
        guidance=guidance(s, 1000),
    )


@model("LTXVideoTransformer3DModel", blocks=2)
def _ltx(s: Size):
    config = dict(
        ATTN, in_channels=PIN, out_channels=4 * COUT, num_layers=2, cross_attention_dim=HIDDEN, caption_channels=TEXT
    )
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.fhw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=mask(s),
        timestep=time(s, 1000),
        num_frames=s.frames,
        height=s.h,
        width=s.w,
        rope_interpolation_scale=(1.25, 32, 32),  # frame 1/16 and row 1/64: exact in floating point
    )


@model("AuraFlowTransformer2DModel", blocks=4)
def _auraflow(s: Size):
    config = dict(
        ATTN, sample_size=26, patch_size=PATCH, in_channels=CIN, out_channels=COUT, num_mmdit_layers=2,
        num_single_dit_layers=2, joint_attention_dim=TEXT, caption_projection_dim=HIDDEN, pos_embed_max_size=144,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s),
    )


@model("HunyuanDiT2DModel", blocks=6)
def _hunyuandit(s: Size):
    t5 = 56  # width of the second text, twice as long as the first; its pooler needs a multiple of 8
    # six layers: the last two take skip connections from the first two
    config = dict(
        ATTN, in_channels=CIN, patch_size=PATCH, sample_size=26, hidden_size=HIDDEN, num_layers=6,
        cross_attention_dim=TEXT, cross_attention_dim_t5=t5, pooled_projection_dim=POOLED,
        text_len=s.text, text_len_t5=2 * s.text, learn_sigma=False,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_hidden_states_t5=randn(s.batch, 2 * s.text, t5),
        text_embedding_mask=mask(s),
        text_embedding_mask_t5=mask(s, 2 * s.text),
        timestep=time(s, 1000),
        image_meta_size=torch.tensor([[96, 128, 96, 128, 0, 0]] * s.batch).float(),
        style=torch.zeros(s.batch, dtype=torch.long),
        image_rotary_emb=rope(randn, s.hw),
    )


@model("LatteTransformer3DModel", blocks=4)
def _latte(s: Size):
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=2, cross_attention_dim=HIDDEN, attention_bias=True,
        sample_size=26, patch_size=PATCH, activation_fn="gelu-approximate", num_embeds_ada_norm=1000,
        norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6, caption_channels=TEXT,
        video_length=s.frames,
    )  # fmt: skip
    # Unlike its docstring, the forward takes no keep-mask, only a bias with one row per frame.
    bias = ((1 - mask(s).float()) * -10000.0).repeat_interleave(s.frames, dim=0).unsqueeze(1)
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=bias if s.batch > 1 else None,
        timestep=time(s, 1000),
    )
