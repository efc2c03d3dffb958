"""Image models beyond the core ones, from plain cross attention to experts, causal prefixes and linear attention."""

from __future__ import annotations

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
    ROPE3,
    TEXT,
    Size,
    ids,
    mask,
    model,
    optional,
    time,
)


@model("LuminaNextDiT2DModel", blocks=2)
def _luminanext(s: Size):
    config = dict(
        sample_size=26, patch_size=PATCH, in_channels=CIN, hidden_size=HIDDEN, num_layers=2,
        num_attention_heads=HEADS, num_kv_heads=8, multiple_of=20, cross_attention_dim=TEXT,
    )  # fmt: skip

    def grid(randn):  # one larger than the image, which the model crops
        angle = randn(17, 18, HEAD_DIM // 2)
        return torch.polar(torch.ones_like(angle), angle)

    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_mask=mask(s),
        timestep=time(s),
        image_rotary_emb=grid(randn),
        # not optional: proportional attention, whose scale grows with the number of tokens
        cross_attention_kwargs=dict(base_sequence_length=16),
    )


@model("NucleusMoEImageTransformer2DModel", blocks=6)
def _nucleusmoe(s: Size):
    # The first three blocks and the last are dense; in the two between, experts choose their tokens.  They run in a
    # loop, as is the default, since grouped matmuls compile in bfloat16 only.
    config = dict(
        ATTN, in_channels=PIN, out_channels=COUT, num_layers=6, num_key_value_heads=8, joint_attention_dim=TEXT,
        axes_dims_rope=ROPE3, num_experts=6, moe_intermediate_dim=100, capacity_factors=2.0,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_hidden_states_mask=optional(mask(s)),
        timestep=time(s),
        img_shapes=[(1, s.h, s.w)] * s.batch,
    )


@model("OmniGenTransformer2DModel", blocks=2)
def _omnigen(s: Size):
    vocabulary = 60
    config = dict(
        in_channels=CIN, patch_size=PATCH, hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        intermediate_size=400, num_layers=2, pad_token_id=2, vocab_size=vocabulary, pos_embed_max_size=16,
        rope_scaling=dict(short_factor=[1.0, 1.25, 1.5, 2.0], long_factor=[1.0, 2.0, 4.0, 8.0]),
    )  # fmt: skip
    # The sequence is text, one token for the time, image.
    text = s.text - 1 if s.text % 2 == 0 else s.text
    length = text + 1 + s.hw
    # The first element has an input image, at four of its text's tokens; the second is padded, on the left.
    picture = [2, 6]
    padding = [3 * i for i in range(s.batch)]

    def attends():  # causal, but all to all within the image and within the input image
        keep = torch.ones(s.batch, length, length).tril()
        keep[:, text + 1 :] = 1
        for i, n in enumerate(padding):
            keep[i, :, :n] = 0
            keep[i, :n] = 1
        keep[0, picture[0] : picture[1], picture[0] : picture[1]] = 1
        return keep

    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        timestep=time(s),
        input_ids=(randn(s.batch, text).abs() * 16).long() % vocabulary,
        input_img_latents=[randn(1, CIN, 2 * PATCH, 2 * PATCH)],
        input_image_sizes={0: [picture]},
        attention_mask=attends(),
        position_ids=torch.stack([(torch.arange(length) - n).clamp(min=0) for n in padding]),
    )


@model("OvisImageTransformer2DModel", blocks=4)
def _ovis(s: Size):
    config = dict(
        ATTN, in_channels=PIN, out_channels=4 * COUT, num_layers=2, num_single_layers=2, joint_attention_dim=TEXT,
        axes_dims_rope=ROPE3,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s),
        img_ids=ids(3, s.h, s.w),
        txt_ids=ids(3, s.text) + ids(3, s.text, 1),  # a text token's position is its row and its column
    )


@model("PRXTransformer2DModel", blocks=2)
def _prx(s: Size):
    config = dict(
        in_channels=CIN, patch_size=PATCH, context_in_dim=TEXT, hidden_size=HIDDEN, num_heads=HEADS, depth=2,
        axes_dim=[4, 4],
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        attention_mask=None if s.batch == 1 else mask(s).bool(),
        timestep=time(s)[:1],  # one for the whole batch
    )


@model("QwenImage21Transformer2DModel", blocks=2)
def _qwenimage21(s: Size):
    config = dict(ATTN, in_channels=PIN, out_channels=4 * COUT, num_layers=2, context_in_dim=TEXT, axes_dims_rope=ROPE3)
    # Two tokens of text, a condition image of 2 x 4, the other text, the image.  Where the encoder has a slot
    # for an image, the sequence has 2 x 2 tokens, hence the even height and width.
    h, w, before, slots = s.h - s.h % 2, s.w - s.w % 2, 2, 2
    length = s.text + slots
    image = torch.zeros(s.batch, length + h * w // 4, dtype=torch.bool)
    image[:, before : before + slots] = image[:, length:] = True
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, 4 * slots + h * w, PIN),
        encoder_hidden_states=randn(s.batch, length, TEXT),
        encoder_hidden_states_mask=optional(mask(s, length)),
        timestep=time(s),
        img_shapes=[[(1, 2, 4), (1, h, w)]] * s.batch,
        img_mask=image.clone(),
    )


@model("SanaTransformer2DModel", blocks=2)
def _sana(s: Size):
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=2, num_cross_attention_heads=12,
        cross_attention_head_dim=16, cross_attention_dim=HIDDEN, caption_channels=TEXT, sample_size=26,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.h, s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=optional(mask(s)),
        timestep=time(s, 1000),
    )


@model("Transformer2DModel", blocks=2)
def _transformer2d(s: Size):
    # as in the UNet of Stable Diffusion XL
    config = dict(
        ATTN, in_channels=HIDDEN, num_layers=2, cross_attention_dim=TEXT, norm_num_groups=32, use_linear_projection=True
    )
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, HIDDEN, s.h, s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=optional(mask(s)),
    )


@model("ZImageTransformer2DModel", blocks=2)
def _zimage(s: Size):
    # The model pads image and text to multiples of 32 each, so that no sequence of it is odd.
    config = dict(
        in_channels=CIN, dim=HIDDEN, n_layers=2, n_refiner_layers=2, n_heads=HEADS, n_kv_heads=HEADS,
        cap_feat_dim=TEXT, axes_dims=list(ROPE3), axes_lens=[80, 16, 18],
    )  # fmt: skip
    return config, lambda randn: dict(
        x=[randn(CIN, 1, PATCH * s.h, PATCH * s.w) for _ in range(s.batch)],
        t=time(s),
        cap_feats=[randn(s.text + 32 * i, TEXT) for i in range(s.batch)],  # padded to different lengths
    )


@model("JoyImageEditTransformer3DModel", blocks=2)
def _joyimage(s: Size):
    config = dict(
        in_channels=CIN, out_channels=COUT, hidden_size=HIDDEN, num_attention_heads=HEADS, text_dim=TEXT, num_layers=2,
        rope_dim_list=list(ROPE3),
    )  # fmt: skip
    images = 2 + s.hw % 2  # references, then the image; their tokens are an odd number where those of one are
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, images, CIN, 1, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s, 1000),
    )


@model("JoyImageEditPlusTransformer3DModel", blocks=2)
def _joyimageplus(s: Size):
    config = dict(
        in_channels=CIN, out_channels=COUT, hidden_size=HIDDEN, num_attention_heads=HEADS, text_dim=TEXT, num_layers=2,
        rope_dim_list=list(ROPE3),
    )  # fmt: skip
    # patches of the image and of a reference, which is smaller in the second element: padding
    shapes = [[(1, s.h, s.w), (1, 2, 4 - i)] for i in range(s.batch)]
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw + 8, CIN, 1, PATCH, PATCH),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_hidden_states_mask=optional(mask(s)),
        timestep=time(s, 1000),
        shape_list=shapes,
    )
