"""Video models beyond the core twelve."""

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


@model("AllegroTransformer3DModel", blocks=2)
def _allegro(s: Size):
    axis = 4  # each of the three rotary axes takes a third of the head dim
    hidden = HEADS * 3 * axis
    config = dict(
        num_attention_heads=HEADS, attention_head_dim=3 * axis, in_channels=CIN, out_channels=COUT, num_layers=2,
        cross_attention_dim=hidden, caption_channels=TEXT, sample_height=26, sample_width=28, sample_frames=s.frames,
    )  # fmt: skip

    def angles(randn, length: int):
        angle = randn(length, axis // 2).repeat(1, 2)
        return angle.cos(), angle.sin()

    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=mask(s),
        timestep=time(s, 1000),
        # frequencies by axis, then the position of each token on each axis
        image_rotary_emb=(
            tuple(angles(randn, length) for length in (s.frames, s.h, s.w)),
            tuple(ids(3, s.frames, s.h, s.w).long().T.reshape(3, 1, -1)),
        ),
    )


@model("AnyFlowTransformer3DModel", blocks=2)
def _anyflow(s: Size):
    config = dict(ATTN, in_channels=CIN, out_channels=COUT, text_dim=TEXT, ffn_dim=400, num_layers=2)
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.frames, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s, 1000)[:, None].repeat(1, s.frames),
        r_timestep=time(s, 500)[:, None].repeat(1, s.frames),
    )


@model("ChronoEditTransformer3DModel", blocks=2)
def _chronoedit(s: Size):
    image = 40  # width of the image embeddings
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, text_dim=TEXT, ffn_dim=400, num_layers=2, image_dim=image,
        added_kv_proj_dim=HIDDEN,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, 512, TEXT),  # the class tells image and text tokens apart by this
        encoder_hidden_states_image=randn(s.batch, 17, image),
        timestep=time(s, 1000),
    )


@model("ConsisIDTransformer3DModel", blocks=4)
def _consisid(s: Size):
    face, vit = 38, 34  # widths of the face and the image embeddings
    # four layers: the face enters after every second one
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=4, time_embed_dim=52, text_embed_dim=TEXT,
        use_rotary_positional_embeddings=True, is_train_face=True, cross_attn_dim_head=14, cross_attn_num_heads=12,
        LFE_id_dim=face, LFE_vit_dim=vit, LFE_depth=5, LFE_dim_head=9, LFE_num_heads=4, LFE_num_id_token=5,
        LFE_num_querie=18, LFE_output_dim=HIDDEN * 2 // 3, LFE_num_scale=5,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.frames, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s, 1000),
        image_rotary_emb=rope(randn, s.fhw),
        # one face for all of the batch
        id_cond=randn(1, face),
        id_vit_hidden=[randn(1, 23, vit) for _ in range(5)],
    )


@model("CosmosTransformer3DModel", blocks=2, heads=8)
def _cosmos(s: Size):
    # The rotary embedding divides by zero at head dims below 12. The padding mask needs torchvision.
    config = dict(
        num_attention_heads=8, attention_head_dim=24, in_channels=CIN + 1, out_channels=COUT, num_layers=2,
        text_embed_dim=TEXT, adaln_lora_dim=30, max_size=(18, 62, 64), concat_padding_mask=False,
    )  # fmt: skip
    times = time(s)
    if s.batch > 1:  # one time per frame, 0 for a given one
        times = times.view(-1, 1, 1, 1, 1) * (torch.arange(s.frames) > 0).view(-1, 1, 1)
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        attention_mask=optional(mask(s).bool()),
        timestep=times.clone(),
        fps=16,
        condition_mask=randn(s.batch, 1, s.frames, PATCH * s.h, PATCH * s.w).round().clamp(0, 1),
    )


@model("EasyAnimateTransformer3DModel", blocks=3, heads=8)
def _easyanimate(s: Size):
    # its rotary embedding needs a head dim divisible by 16; the last layer is not an MMDiT block
    config = dict(
        num_attention_heads=8, attention_head_dim=32, in_channels=2 * CIN + 1, out_channels=CIN, patch_size=PATCH,
        num_layers=3, mmdit_layers=2, time_embed_dim=52, add_norm_text_encoder=True, text_embed_dim=TEXT,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s, 1000),
        inpaint_latents=randn(s.batch, CIN + 1, s.frames, PATCH * s.h, PATCH * s.w),
    )


@model("HeliosTransformer3DModel", blocks=2)
def _helios(s: Size):
    config = dict(ATTN, in_channels=CIN, out_channels=COUT, text_dim=TEXT, ffn_dim=400, num_layers=2, rope_dim=ROPE3)
    # the first frame, then history by age: far, middle and near past, each patched finer than the one before
    first, far, middle, near, now = torch.arange(20 + s.frames)[None].split([1, 16, 2, 1, s.frames], dim=1)
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s, 1000),
        indices_hidden_states=now.clone(),
        indices_latents_history_short=torch.cat([first, near], dim=1),
        indices_latents_history_mid=middle.clone(),
        indices_latents_history_long=far.clone(),
        latents_history_short=randn(s.batch, CIN, 2, PATCH * s.h, PATCH * s.w),
        latents_history_mid=randn(s.batch, CIN, 2, PATCH * s.h, PATCH * s.w),
        latents_history_long=randn(s.batch, CIN, 16, PATCH * s.h, PATCH * s.w),
    )


@model("HunyuanVideo15Transformer3DModel", blocks=2)
def _hunyuanvideo15(s: Size):
    glyph, image = 40, 38  # widths of the second text and of the image embeddings
    config = dict(
        ATTN, in_channels=2 * CIN + 1, out_channels=COUT, num_layers=2, num_refiner_layers=2, text_embed_dim=TEXT,
        text_embed_2_dim=glyph, image_embed_dim=image, rope_axes_dim=ROPE3,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, 2 * CIN + 1, s.frames, s.h, s.w),  # the patch size is 1
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=mask(s),
        encoder_hidden_states_2=randn(s.batch, s.text + 8, glyph),
        encoder_attention_mask_2=mask(s, s.text + 8),
        image_embeds=randn(s.batch, 9, image) * (s.frames % 2),  # "even" is text to video: all zero
        timestep=time(s, 1000),
    )


@model("HunyuanVideoFramepackTransformer3DModel", blocks=4)
def _framepack(s: Size):
    image = 38  # width of the image embeddings
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=2, num_single_layers=2, num_refiner_layers=2,
        text_embed_dim=TEXT, pooled_projection_dim=POOLED, rope_axes_dim=ROPE3, has_image_proj=True,
        image_proj_dim=image, has_clean_x_embedder=True,
    )  # fmt: skip
    # the first frame, a gap, what is sampled now, and later frames: near, farther and far
    first, _, now, near, farther, far = torch.arange(29 + s.frames).split([1, 9, s.frames, 1, 2, 16])
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=mask(s),
        pooled_projections=randn(s.batch, POOLED),
        image_embeds=randn(s.batch, 9, image),
        timestep=time(s, 1000),
        guidance=guidance(s, 1000),
        indices_latents=now.clone(),
        latents_clean=randn(s.batch, CIN, 2, PATCH * s.h, PATCH * s.w),
        indices_latents_clean=torch.cat([first, near]),
        latents_history_2x=randn(s.batch, CIN, 2, PATCH * s.h, PATCH * s.w),
        indices_latents_history_2x=farther.clone(),
        latents_history_4x=randn(s.batch, CIN, 16, PATCH * s.h, PATCH * s.w),
        indices_latents_history_4x=far.clone(),
    )


@model("Kandinsky5Transformer3DModel", blocks=2)
def _kandinsky5(s: Size):
    config = dict(
        in_visual_dim=CIN, out_visual_dim=COUT, in_text_dim=TEXT, in_text_dim2=POOLED, time_dim=52, model_dim=HIDDEN,
        ff_dim=400, num_text_blocks=2, num_visual_blocks=2, axes_dims=ROPE3, visual_cond=True,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.frames, PATCH * s.h, PATCH * s.w, 2 * CIN + 1),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        pooled_projections=randn(s.batch, POOLED),
        timestep=time(s, 1000),
        visual_rope_pos=[torch.arange(n) for n in (s.frames, s.h, s.w)],
        text_rope_pos=torch.arange(s.text),
        scale_factor=(1.0, 2.0, 2.0),
    )


@model("Kandinsky6Transformer3DModel", blocks=2)
def _kandinsky6(s: Size):
    audio, audio_heads = 9, 12  # channels and heads of the audio stream
    # at the "even" label an image is given: it is appended as one more frame, at the position of the first
    tail = s.frames % 2 == 0
    frames = s.frames + tail
    config = dict(
        in_visual_dim=CIN, out_visual_dim=COUT, in_text_dim=TEXT, in_text_dim2=POOLED, time_dim=52, model_dim=HIDDEN,
        ff_dim=400, num_text_blocks=2, num_visual_blocks=2, axes_dims=ROPE3, in_audio_dim=audio, out_audio_dim=audio,
        model_dim_a=audio_heads * HEAD_DIM, time_dim_a=46, ff_dim_a=204, text_token_padding=True, ca_rope=True,
        cross_gates=True, fix_modulation=True, visual_token_type_num_embeddings=2,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, frames, PATCH * s.h, PATCH * s.w, 2 * CIN + 1),
        audio_hidden_states=randn(s.batch, 8 * s.frames + 1 - tail, audio),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        pooled_projections=randn(s.batch, POOLED),
        timestep=time(s, 1000),
        encoder_attention_mask=optional(mask(s).bool()),
        visual_rope_pos=(torch.arange(frames) % s.frames, torch.arange(s.h), torch.arange(s.w)) if tail else None,
        visual_token_type_ids=(torch.arange(frames) // s.frames).expand(s.batch, -1) if tail else None,
    )


@model("Kandinsky6SRTransformer3DModel", blocks=2, heads=12)
def _kandinsky6_sr(s: Size):
    # Its attention works on blocks of 8 x 8 tokens, so only the number of these can be odd. It takes head dims from
    # 16 on, and with more frames its block mask leaves some blocks out (which eager flex attention does not heed).
    frames, height, width = s.frames + 4, 8, 8 * s.batch
    config = dict(
        in_visual_dim=CIN, out_visual_dim=COUT, time_dim=52, model_dim=HIDDEN, ff_dim=400, num_visual_blocks=2,
        axes_dims=(4, 4, 8), nabla_window=(3, 1, 1),
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, frames, height, width, 2 * CIN + 1),
        timestep=time(s, 1000),
    )


@model("MiniMaxH3Transformer3DModel", blocks=2)
def _minimax_h3(s: Size):
    audio, track = 9, 12  # audio channels, and length of each of the two tracks
    config = dict(
        ATTN, hidden_size=164, in_channels=CIN, audio_in_channels=audio, num_layers=2, num_refiner_layers=2,
        ffn_dim=400, text_dim=TEXT, time_embed_hidden_dim=52, time_embed_dim=46, rope_freq_dim=1,
    )  # fmt: skip
    # one sequence: text, a given frame, audio, video
    lengths = [s.text, s.hw, 2 * track, s.fhw]
    text, given, sound, video = torch.arange(sum(lengths)).split(lengths)
    tags = torch.tensor([1, 0, 2, 0]).repeat_interleave(torch.tensor(lengths))
    tags[1:4] = 0  # text that stands for the given frame counts as video
    clock = torch.cat([torch.arange(s.text), torch.arange(track).repeat(2) + s.text]).double()
    positions = torch.zeros(sum(lengths), 3, dtype=torch.double)
    positions[torch.cat([text, sound]), 0] = clock
    positions[sound, 2] = 32 * (torch.arange(2 * track) // track).double()
    for rows, start, frames in ((given, s.text, 1), (video, s.text, s.frames)):
        positions[rows] = ids(3, frames, s.h, s.w).double() * torch.tensor([5, 3, 2]) + torch.tensor([start, 0, 0])
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw + s.fhw, PIN),
        audio_hidden_states=randn(s.batch, 2 * track, audio),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=torch.tensor([1 / 16, 1.0]),
        timestep_indices=torch.isin(torch.arange(sum(lengths)), given).long(),
        token_tags=tags.clone(),
        position_ids=positions.clone(),
        video_indices=torch.cat([given, video]),
        audio_indices=sound.clone(),
        text_indices=text.clone(),
    )


@model("LTX2VideoTransformer3DModel", blocks=2)
def _ltx2(s: Size):
    audio, audio_dim = 9, 6  # audio channels, and head dim of the audio stream
    new = s.batch > 1  # LTX-2.3; else 2.0
    widths = (HIDDEN, HEADS * audio_dim) if new else (TEXT, TEXT)
    config = dict(
        ATTN, in_channels=PIN, out_channels=4 * COUT, num_layers=2, cross_attention_dim=HIDDEN, caption_channels=TEXT,
        audio_in_channels=audio, audio_out_channels=audio, audio_num_attention_heads=HEADS,
        audio_attention_head_dim=audio_dim, audio_cross_attention_dim=HEADS * audio_dim, rope_type="split",
        gated_attn=new, cross_attn_mod=new, audio_gated_attn=new, audio_cross_attn_mod=new,
        use_prompt_embeddings=not new, perturbed_attn=new,
    )  # fmt: skip
    times = time(s, 1000)
    sound = 8 * s.frames + s.frames % 2
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.fhw, PIN),
        audio_hidden_states=randn(s.batch, sound, audio),
        encoder_hidden_states=randn(s.batch, s.text, widths[0]),
        audio_encoder_hidden_states=randn(s.batch, s.text, widths[1]),
        encoder_attention_mask=mask(s),
        audio_encoder_attention_mask=mask(s),
        # at the "even" label the first frame is given, so time goes by token
        timestep=times.clone() if s.frames % 2 else times[:, None] * (torch.arange(s.fhw) >= s.hw),
        audio_timestep=times.clone(),
        sigma=times.clone(),  # which 2.0 ignores
        num_frames=s.frames,
        height=s.h,
        width=s.w,
        fps=24.0,
        audio_num_frames=sound,
        use_cross_timestep=new,
    )


@model("AnyFlowFARTransformer3DModel", blocks=2, heads=12)
def _anyflow_far(s: Size):
    # A step of the causal sampling: of the three chunks before this one, the first is cached compressed.
    heads, head_dim = 12, 16  # flex attention takes head dims from 16 on
    config = dict(
        num_attention_heads=heads, attention_head_dim=head_dim, in_channels=CIN, out_channels=COUT, text_dim=TEXT,
        ffn_dim=400, num_layers=2,
    )  # fmt: skip
    chunks = [1, 2, 2, s.frames]
    full, compressed = s.hw, (s.h // 2) * (s.w // 2)  # tokens per frame

    def cache(randn, count: int, tokens: int):
        return randn(2, s.batch, heads, count * max(chunks) * tokens, head_dim)

    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.frames, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=time(s, 1000)[:, None].repeat(1, s.frames),
        r_timestep=time(s, 500)[:, None].repeat(1, s.frames),
        chunk_partition=list(chunks),
        kv_cache={
            i: dict(full_cache=cache(randn, 3, full), compressed_cache=cache(randn, 2, compressed)) for i in range(2)
        },
        # the forward writes the two numbers of tokens in here, so have them there from the first call on
        kv_cache_flag=dict(
            num_cached_chunks=3, is_cache_step=False, num_cached_full_tokens=4 * full,
            num_cached_compressed_tokens=compressed,
        ),
    )  # fmt: skip


@model("Cosmos3OmniTransformer", blocks=2, labels=("even", "odd"))  # it takes no batch: items are packed
def _cosmos3_omni(s: Size):
    sound, action = 9, 6  # channels
    kind = "action" if s.frames % 2 == 0 else "sound"  # what comes with the video; a given first frame with action
    extra = 24 if kind == "action" else 11
    config = dict(
        head_dim=HEAD_DIM, hidden_size=164, intermediate_size=400, latent_channel=CIN, patch_latent_dim=PIN,
        num_attention_heads=HEADS, num_key_value_heads=8, num_hidden_layers=2, vocab_size=110, rope_axes_dim=(2, 1, 1),
        action_gen=True, action_dim=action, num_embodiment_domains=3, sound_gen=True, sound_dim=sound,
    )  # fmt: skip
    given = 1 if kind == "action" else 0
    start, end = s.text, s.text + s.fhw
    grid = ids(3, s.frames, s.h, s.w).T + torch.tensor([[s.text + 15000], [0], [0]])
    more = torch.stack([torch.arange(extra) / 4 + s.text + 15000, torch.zeros(extra), torch.zeros(extra)])
    rows = torch.arange(end, end + extra)

    def tokens(randn, channels: int):
        return randn(extra, channels) if kind == "action" else randn(channels, extra)

    def inputs(randn):
        made = dict(
            input_ids=torch.arange(s.text) * 7 % 110,
            text_indexes=torch.arange(s.text),
            position_ids=torch.cat([torch.arange(s.text).float().expand(3, -1), grid, more], dim=1),
            und_len=s.text,
            sequence_length=end + extra,
            vision_tokens=[randn(1, CIN, s.frames, PATCH * s.h, PATCH * s.w)],
            vision_token_shapes=[(s.frames, s.h, s.w)],
            vision_sequence_indexes=torch.arange(start, end),
            vision_mse_loss_indexes=torch.arange(start + given * s.hw, end),
            vision_timesteps=torch.full(((s.frames - given) * s.hw,), 62.5),
            vision_noisy_frame_indexes=[torch.arange(given, s.frames)],
        )
        made |= {
            f"{kind}_tokens": [tokens(randn, action if kind == "action" else sound)],
            f"{kind}_token_shapes": [(extra, 1, 1)],
            f"{kind}_sequence_indexes": rows.clone(),
            f"{kind}_mse_loss_indexes": rows.clone(),
            f"{kind}_timesteps": torch.full((extra,), 62.5),
            f"{kind}_noisy_frame_indexes": [torch.arange(extra)],
        }
        if kind == "action":
            made["action_domain_ids"] = [torch.tensor(1)]
        return made

    return config, inputs
