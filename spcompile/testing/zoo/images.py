"""Image models beyond the core twelve."""

from __future__ import annotations

from typing import Any

import torch

from spcompile.testing.zoo.common import (
    ATTN,
    CIN,
    COUT,
    HEADS,
    HIDDEN,
    PATCH,
    PIN,
    POOLED,
    ROPE3,
    TEXT,
    Size,
    ids,
    mask,
    model,
    optional,
    time,
)

TEXT2 = 52  # width of a second text, or of the text encoder's inner layers


def _even(length: int) -> int:
    """A text length that makes text and image together, in one sequence, odd where the image is."""
    return length // 2 * 2


def _sizes(s: Size) -> torch.Tensor:
    """Image heights and widths in pixels, one row per element."""
    return torch.tensor([[96.0, 128.0], [64.0, 112.0]])[: s.batch]


@model("BriaFibo2Transformer2DModel", blocks=4)
def _bria_fibo2(s: Size):
    # two plain blocks and two that read the text; 24, 16 and (16, 8) gist tokens at the three labels
    config = dict(
        in_channels=CIN, patch_size=PATCH, dim=HIDDEN, n_layers=4, n_refiner_layers=2, n_heads=HEADS,
        cap_feat_dim=TEXT, injection_layer_ids=(1, 3), perceiver_num_layers=2, min_num_gist_tokens=8,
        max_num_gist_tokens=24, gist_step=8, gist_min_text_len=3, gist_max_text_len=48, axes_dims=ROPE3,
        axes_lens=(64, 32, 32),
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        timestep=time(s),
        encoder_hidden_states=randn(s.batch, 3, s.text, TEXT),  # one bundle for the gist, one per injection
        encoder_attention_mask=optional(mask(s).bool()),
        # images to edit, of another size, at batch 2
        context_latents=[randn(s.batch, CIN, PATCH * 3, PATCH * 5)] if s.batch > 1 else None,
    )


@model("BriaFiboTransformer2DModel", blocks=4)
def _bria_fibo(s: Size):
    config = dict(
        ATTN, in_channels=PIN, num_layers=2, num_single_layers=2, joint_attention_dim=TEXT, text_encoder_dim=TEXT2,
        axes_dims_rope=ROPE3,
    )  # fmt: skip
    # the pipeline has no other way to pass its mask, and does so only if something is padded
    keep = torch.cat([mask(s), torch.ones(s.batch, s.hw)], dim=1).bool()[:, None, None]
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        text_encoder_layers=[randn(s.batch, s.text, TEXT2) for _ in range(4)],
        timestep=time(s, 1000),
        img_ids=ids(3, s.h, s.w),
        txt_ids=torch.zeros(s.text, 3),
        joint_attention_kwargs=dict(attention_mask=keep) if s.batch > 1 else {},
    )


@model("BriaTransformer2DModel", blocks=4)
def _bria(s: Size):
    config = dict(
        ATTN, in_channels=PIN, num_layers=2, num_single_layers=2, joint_attention_dim=TEXT, axes_dims_rope=ROPE3
    )
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s, 1000),
        img_ids=ids(3, s.h, s.w),
        txt_ids=torch.zeros(s.text, 3),
    )


@model("ChromaTransformer2DModel", blocks=4)
def _chroma(s: Size):
    config = dict(
        ATTN, in_channels=PIN, out_channels=4 * COUT, num_layers=2, num_single_layers=2, joint_attention_dim=TEXT,
        axes_dims_rope=ROPE3, approximator_num_channels=64, approximator_hidden_dim=60, approximator_layers=2,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s),
        img_ids=ids(3, s.h, s.w),
        txt_ids=torch.zeros(s.text, 3),
        attention_mask=torch.cat([mask(s), torch.ones(s.batch, s.hw)], dim=1),  # floats, as from the pipeline
    )


@model("CogView3PlusTransformer2DModel", blocks=2)
def _cogview3plus(s: Size):
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=2, text_embed_dim=TEXT, time_embed_dim=TEXT2,
        condition_dim=12, pos_embed_max_size=13,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s, 1000),
        original_size=_sizes(s),
        target_size=_sizes(s),
        crop_coords=torch.zeros(s.batch, 2),
    )


@model("CogView4Transformer2DModel", blocks=2)
def _cogview4(s: Size):
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=2, text_embed_dim=TEXT, time_embed_dim=TEXT2,
        condition_dim=12, rope_axes_dim=(26, 26),
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s, 1000),
        original_size=_sizes(s),
        target_size=_sizes(s),
        crop_coords=torch.zeros(s.batch, 2),
        attention_mask=optional(mask(s)),
    )


@model("DiTTransformer2DModel", blocks=2)
def _dit(s: Size):
    # the output is cut up as a square, so the input must be one: 16, 25 and 25 tokens
    config = dict(ATTN, in_channels=CIN, out_channels=2 * CIN, num_layers=2, sample_size=PATCH * s.h)
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.h),
        timestep=time(s, 1000),
        class_labels=torch.tensor([207, 1000])[: s.batch],  # 1000 stands for no class
    )


def _gqa_processors(transformer: Any) -> None:
    """The U-Net around it sets these: the default processor cannot do both kv heads and a q/k norm."""
    from diffusers.models.unets.unet_dreamlite import DreamLiteAttnProcessor2_0

    for block in transformer.transformer_blocks:
        block.attn1.set_processor(DreamLiteAttnProcessor2_0())
        block.attn2.set_processor(DreamLiteAttnProcessor2_0())


@model("DreamLiteTransformer2DModel", blocks=2, prepare=_gqa_processors)
def _dreamlite(s: Size):
    # a part of a U-Net: as many channels as hidden features, one pixel per token (there with one kv head)
    config = dict(
        ATTN, in_channels=HIDDEN, num_layers=2, cross_attention_dim=TEXT, qk_norm="rms_norm", num_kv_heads=4, ff_mult=6
    )
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, HIDDEN, s.h, s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=optional(mask(s)),
    )


@model("ErnieImageTransformer2DModel", blocks=2)
def _ernie_image(s: Size):
    config = dict(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_layers=2, ffn_hidden_size=400, in_channels=PIN,
        out_channels=4 * COUT, text_in_dim=TEXT, rope_axes_dim=ROPE3,
    )  # fmt: skip
    text = _even(s.text)
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, PIN, s.h, s.w),  # patchified by the pipeline
        timestep=time(s, 1000),
        text_bth=randn(s.batch, text, TEXT),
        text_lens=mask(s, text).sum(dim=1),
    )


@model("Flux3Transformer2DModel", blocks=4)
def _flux3(s: Size):
    config = dict(
        ATTN, in_channels=PIN, cond_in_channels=4 * COUT, num_layers=2, num_single_layers=2,
        joint_attention_dim=TEXT, axes_dims_rope=(2, 2, 2, 2),
    )  # fmt: skip
    image, cond = ids(4, s.h, s.w, 1) / 2, ids(4, 3, s.h, 1) / 2  # (t, h, w, l), with the pipeline's scale
    cond[:, 3] = -1
    # text to image at "even", image to image at the others: 15 reference tokens
    edits = s.hw % 2 == 1
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s),
        img_ids=image,
        txt_ids=ids(4, s.text),
        image_cond_hidden_states=randn(s.batch, len(cond), 4 * COUT) if edits else None,
        image_cond_ids=cond if edits else None,
    )


@model("GlmImageTransformer2DModel", blocks=2)
def _glm_image(s: Size):
    codes = 60
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=2, text_embed_dim=TEXT, time_embed_dim=TEXT2,
        condition_dim=12, prior_vq_quantizer_codebook_size=codes,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        prior_token_id=torch.arange(s.batch * s.hw).reshape(s.batch, s.hw) * 7 % codes,
        prior_token_drop=(torch.arange(s.batch) == 1)[:, None].expand(s.batch, s.hw),
        timestep=time(s, 1000),
        target_size=_sizes(s),
        crop_coords=torch.zeros(s.batch, 2),
        attention_mask=optional(mask(s)),
    )


@model("HiDreamImageTransformer2DModel", blocks=4)
def _hidream_image(s: Size):
    # Square at "even". Others are padded to the largest resolution: 55 and 75 tokens
    square = s.hw % 2 == 0
    h, w = (s.h, s.h) if square else (s.h, s.w)
    config = dict(
        ATTN, patch_size=PATCH, in_channels=CIN, out_channels=COUT, num_layers=2, num_single_layers=2,
        caption_channels=[TEXT, TEXT2], text_emb_dim=POOLED, axes_dims_rope=(4, 2, 2),
        max_resolution=(PATCH * s.h, PATCH * (s.w + 4)), llama_layers=[0, 1, 2, 2],
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * h, PATCH * w),
        timesteps=time(s, 1000),
        encoder_hidden_states_t5=randn(s.batch, s.text, TEXT),
        encoder_hidden_states_llama3=randn(3, s.batch, s.text, TEXT2),  # three of its layers
        pooled_embeds=randn(s.batch, POOLED),
    )


@model("HunyuanImageTransformer2DModel", blocks=4)
def _hunyuanimage(s: Size):
    config = dict(
        ATTN, in_channels=PIN, out_channels=4 * COUT, num_layers=2, num_single_layers=2, num_refiner_layers=2,
        text_embed_dim=TEXT, text_embed_2_dim=TEXT2, rope_axes_dim=(4, 4),
    )  # fmt: skip
    glyphs = s.text - s.text // 3  # 32, 9, 5
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, PIN, s.h, s.w),
        timestep=time(s, 1000),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=mask(s),
        encoder_hidden_states_2=randn(s.batch, glyphs, TEXT2),
        encoder_attention_mask_2=mask(s, glyphs),
    )


@model("Ideogram4Transformer2DModel", blocks=2)
def _ideogram4(s: Size):
    config = dict(
        ATTN, in_channels=PIN, num_layers=2, intermediate_size=400, adaln_dim=56, llm_features_dim=TEXT,
        mrope_section=(2, 1, 1),
    )  # fmt: skip
    text = _even(s.text)
    # text is padded on the left; images start at a far position; padding attends to padding only
    keep = mask(s, text).flip(1)
    order = ((keep.cumsum(dim=1) - 1) * keep)[..., None].expand(-1, -1, 3)
    image = (ids(3, s.h, s.w).long() + 65536).expand(s.batch, -1, -1)
    segment = torch.cat([2 * keep - 1, torch.ones(s.batch, s.hw, dtype=torch.long)], dim=1)
    role = torch.cat([3 * keep, torch.full((s.batch, s.hw), 2)], dim=1)
    return config, lambda randn: dict(
        hidden_states=torch.cat([torch.zeros(s.batch, text, PIN), randn(s.batch, s.hw, PIN)], dim=1),
        timestep=time(s),
        encoder_hidden_states=torch.cat(
            [randn(s.batch, text, TEXT) * keep[..., None], torch.zeros(s.batch, s.hw, TEXT)], dim=1
        ),
        position_ids=torch.cat([order, image], dim=1),
        segment_ids=segment,
        indicator=role,
    )


@model("Krea2Transformer2DModel", blocks=2)
def _krea2(s: Size):
    layers = 3
    config = dict(
        ATTN, in_channels=PIN, num_layers=2, num_key_value_heads=8, intermediate_size=400, timestep_embed_dim=28,
        text_hidden_dim=TEXT, num_text_layers=layers, text_num_attention_heads=4, text_num_key_value_heads=4,
        text_intermediate_size=100, axes_dims_rope=ROPE3,
    )  # fmt: skip
    text = _even(s.text)
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, PIN),
        encoder_hidden_states=randn(s.batch, text, layers, TEXT),
        timestep=time(s),
        position_ids=torch.cat([torch.zeros(text, 3), ids(3, s.h, s.w)]),
        encoder_attention_mask=mask(s, text).bool(),
    )


@model("LongCatImageTransformer2DModel", blocks=4)
def _longcat_image(s: Size):
    config = dict(
        ATTN, in_channels=PIN, num_layers=2, num_single_layers=2, joint_attention_dim=TEXT, axes_dims_rope=ROPE3
    )
    # (modality, row, column): text runs along the diagonal, the image starts where the longest text would end
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s),
        img_ids=ids(3, s.h, s.w) + torch.tensor([1, 512, 512]),
        txt_ids=torch.arange(s.text)[:, None] * torch.tensor([0.0, 1.0, 1.0]),
    )


@model("Lumina2Transformer2DModel", blocks=2)
def _lumina2(s: Size):
    config = dict(
        sample_size=26, patch_size=PATCH, in_channels=CIN, out_channels=COUT, hidden_size=HIDDEN, num_layers=2,
        num_refiner_layers=2, num_attention_heads=HEADS, num_kv_heads=8, multiple_of=20, axes_dim_rope=ROPE3,
        axes_lens=(60, 26, 26), cap_feat_dim=TEXT,
    )  # fmt: skip
    # the model removes the padding: no padding at "even" keeps the length divisible there
    keep = mask(s) if s.hw % 2 else torch.ones(s.batch, s.text, dtype=torch.long)
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        timestep=time(s),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=keep,
    )
