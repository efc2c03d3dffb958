"""What is neither a diffusion transformer of images nor one of videos: embeddings, proteins, parts of a UNet."""

from __future__ import annotations

from collections.abc import Callable

import torch

from spcompile.testing.zoo.common import ATTN, HEADS, HIDDEN, POOLED, TEXT, Size, mask, model, time


@model("TransformerTemporalModel", blocks=2)
def _temporal(s: Size):
    channels = 40
    # a part of a 3D UNet: attends over the frames, the positions in a frame are its batch
    config = dict(ATTN, in_channels=channels, num_layers=2, norm_num_groups=8)
    return config, lambda randn: dict(hidden_states=randn(s.batch * s.frames, channels, s.h, s.w), num_frames=s.frames)


@model("PriorTransformer", blocks=2)
def _prior(s: Size):
    text = s.text + 4  # another four tokens follow: the text's and image's embeddings, the time, and the query
    config = dict(ATTN, num_layers=2, embedding_dim=TEXT, num_embeddings=text, additional_embeddings=4)
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, TEXT),
        proj_embedding=randn(s.batch, TEXT),
        encoder_hidden_states=randn(s.batch, text, TEXT),
        attention_mask=mask(s, text).bool(),
        timestep=time(s, 1000),
    )


@model("RFD4ProteinaTransformer", blocks=3)
def _rfd4(s: Size):
    # Tokens are residues, and every pair of them is represented too; the first of three blocks updates the pairs.
    n, latent = s.hw, 9
    config = dict(
        nlayers=3, token_dim=HIDDEN, nheads=HEADS, dim_cond=POOLED, pair_repr_dim=20, latent_dim=latent,
        token_type_emb_dim=10, cath_emb_dim=6, t_emb_dim=52, seq_sep_dim=14, xt_pair_dist_dim=12, tri_mult_c=28,
        num_sequence_classes=31, recycle_conditioning_dim=3,
    )  # fmt: skip

    def inputs(randn: Callable) -> dict:
        def some(*shape: int) -> torch.Tensor:  # a few ones
            return (randn(s.batch, *shape) > 1).long()

        atoms = ("hbond", "pistack", "pication", "saltbridge", "hydrophobic", "metal-coord", "hotspot")
        coordinates = randn(s.batch, n, 37, 3).masked_fill(randn(s.batch, n, 37, 1) > 0, torch.nan)  # NaN: unknown
        order = torch.arange(n)
        conditioning = {
            "is_in_context_conditioning": some(n),
            "supports_local_latent": 1 - some(n),
            "token_bond_path_length": (order[:, None] - order).abs().repeat(s.batch, 1, 1),
            "molecule_iid": (order // 16).repeat(s.batch, 1),
            "molecule_entity_id": (order // 32).repeat(s.batch, 1),
            "condition_index-group_1_token": some(n),
            "condition_coordinate_1_atom": 10 * coordinates,
            "condition_rasa-binned_1_atom": some(n, 37),
            "condition_secondary-structure_1_residue": some(n) + some(n),
            "condition_cath-label_1_residue": some(n, 3),
            "condition_ChainCentroid_1_atom": 10 * randn(s.batch, n, 3),
            "canonical_polymer_ordering": some(n, n),
            "bond_mask": some(n, n),
        } | {f"condition_{name}_1_atom": some(n, 37) for name in atoms}
        return dict(
            bb_ca=randn(s.batch, n, 3),
            local_latents=randn(s.batch, n, latent),
            bb_ca_time=time(s, 4),
            local_latents_time=time(s, 2),
            padding_mask=mask(s, n).bool(),
            token_type=some(n),
            atom37_mask=some(n, 37) == 0,
            conditioning=conditioning,
            recycle_depth=2,
        )

    return config, inputs
