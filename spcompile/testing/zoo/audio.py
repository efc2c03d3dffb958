"""Audio models: sequences with one axis, some with convolutions, sliding windows or prepended tokens."""

from __future__ import annotations

import torch

from spcompile.testing.zoo.common import (
    ATTN,
    CIN,
    COUT,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    POOLED,
    TEXT,
    Size,
    mask,
    model,
    time,
)

# An audio has as many tokens as an image (s.hw), with those that a model itself prepends.


@model("AceStepTransformer1DModel", blocks=4)
def _acestep(s: Size):
    # layers alternate between a sliding window and full attention
    config = dict(
        hidden_size=HIDDEN, intermediate_size=400, num_hidden_layers=4, num_attention_heads=HEADS,
        num_key_value_heads=8, head_dim=HEAD_DIM, in_channels=3 * COUT, audio_acoustic_hidden_dim=COUT,
        sliding_window=6, encoder_hidden_size=TEXT,
    )  # fmt: skip
    length = 2 * s.hw - s.hw % 2  # patches of 2; an odd length, which the model pads, where tokens are odd
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, length, COUT),
        timestep=time(s),
        timestep_r=time(s),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        context_latents=randn(s.batch, length, 2 * COUT),
    )


@model("LongCatAudioDiTTransformer", blocks=2)
def _longcataudio(s: Size):
    config = dict(dit_dim=HIDDEN, dit_depth=2, dit_heads=HEADS, dit_text_dim=TEXT, latent_dim=CIN)
    lengths = torch.tensor([s.hw - 4 * i for i in range(s.batch)])
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, CIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=mask(s).bool(),
        timestep=time(s),
        attention_mask=torch.arange(s.hw) < lengths[:, None],
        latent_cond=randn(s.batch, s.hw, CIN),
    )


@model("MiniMaxMusic3Transformer1DModel", blocks=2)
def _minimaxmusic(s: Size):
    config = dict(
        ATTN, in_channels=CIN, condition_dim=TEXT, num_layers=2, ff_inner_dim=400, rotary_dim=HEAD_DIM // 2,
        fourier_embedding_dim=52,
    )  # fmt: skip
    length = s.hw - 1  # the time is one more token
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, length),
        timestep=time(s),
        encoder_hidden_states=randn(s.batch, length, TEXT),
    )


@model("MiniMaxMusic3RVQDepthDecoder", blocks=2, return_dict=False)
def _minimaxdepth(s: Size):
    # a causal language model; the real one has a step for each of 8 codebooks, here it has as many as text tokens
    config = dict(
        hidden_size=HIDDEN, num_layers=2, num_attention_heads=HEADS, intermediate_size=400, audio_vocab_size=30,
        max_position_embeddings=56,
    )  # fmt: skip
    return config, lambda randn: dict(inputs_embeds=randn(s.batch, s.text, HIDDEN))


@torch.no_grad()
def _gammas(m: torch.nn.Module) -> None:
    for name, p in m.named_parameters():
        if name.endswith("gamma"):  # a norm's weight by another name
            p.add_(1)


@model("StableAudio3DiTModel", blocks=2, prepare=_gammas)
def _stableaudio3(s: Size):
    # 16 memory tokens come before the audio's
    config = dict(
        io_channels=CIN, embed_dim=HIDDEN, depth=2, num_heads=HEADS, cond_token_dim=TEXT, global_cond_dim=POOLED,
        local_add_cond_dim=CIN + 1, num_memory_tokens=16,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.hw),
        timestep=time(s),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        global_hidden_states=randn(s.batch, POOLED),
        encoder_attention_mask=mask(s).bool(),
        local_add_cond=randn(s.batch, CIN + 1, s.hw) if s.batch > 1 else None,  # for inpainting
    )


@model("StableAudioDiTModel", blocks=2)
def _stableaudio(s: Size):
    cross = 60
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=2, num_key_value_attention_heads=12,
        cross_attention_dim=cross, cross_attention_input_dim=TEXT, global_states_input_dim=POOLED, time_proj_dim=52,
    )  # fmt: skip

    def rotary(randn):  # (cos, sin) for half of each head
        angle = randn(s.hw, HEAD_DIM // 4).repeat(1, 2)
        return angle.cos(), angle.sin()

    # The global states are one more token.  The pipeline passes one time for the whole batch and no mask; it
    # sets the padding of the text to zero.
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.hw - 1),
        timestep=time(s)[:1],
        encoder_hidden_states=randn(s.batch, s.text, TEXT) * mask(s)[:, :, None],
        global_hidden_states=randn(s.batch, 1, POOLED),
        rotary_embedding=rotary(randn),
    )


@model("T5FilmDecoder", blocks=2, return_dict=False)
def _t5film(s: Size):
    channels, before = 20, 30
    config = dict(
        input_dims=channels, targets_length=56, d_model=HIDDEN, num_layers=2, num_heads=HEADS, d_kv=HEAD_DIM, d_ff=400
    )
    return config, lambda randn: dict(
        # what to play, and the audio before it
        encodings_and_masks=[
            (randn(s.batch, s.text, HIDDEN), mask(s)),
            (randn(s.batch, before, HIDDEN), torch.ones(s.batch, before)),
        ],
        decoder_input_tokens=randn(s.batch, s.hw, channels),
        decoder_noise_time=time(s),
    )
