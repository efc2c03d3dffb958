"""Plans without runs: for a device that is not there, and for models that no memory here would hold."""

from __future__ import annotations

import pytest
import torch
from helpers import SelfAttention, exchanges, tokens

import spcompile
from spcompile import ops
from spcompile.testing import plan, simulate, zoo

IMAGE, TEXT = 4096, 512


def flux_of_full_width(double_blocks: int, single_blocks: int):
    """Flux.1-dev but for its depth, with inputs for 1024 x 1024 pixels, all on the meta device."""
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model = FluxTransformer2DModel(
            num_layers=double_blocks, num_single_layers=single_blocks, guidance_embeds=True
        ).bfloat16()  # fmt: skip
        inputs = dict(
            hidden_states=torch.empty(1, IMAGE, 64, dtype=torch.bfloat16),
            encoder_hidden_states=torch.empty(1, TEXT, 4096, dtype=torch.bfloat16),
            pooled_projections=torch.empty(1, 768, dtype=torch.bfloat16),
            timestep=torch.empty(1, dtype=torch.bfloat16),
            guidance=torch.empty(1),
            img_ids=torch.empty(IMAGE, 3),
            txt_ids=torch.empty(TEXT, 3),
            return_dict=False,
        )
    return model.eval(), inputs


def test_a_full_size_model_is_planned_without_memory_for_it():
    model, inputs = flux_of_full_width(double_blocks=3, single_blocks=1)
    with torch.autograd.profiler.profile(profile_memory=True) as memory:
        report = plan(model, kwargs=inputs, sp=8, device="cuda").report
    assert sum(max(e.cpu_memory_usage, 0) for e in memory.function_events) < 1 << 20
    assert len(report.attention) == 4
    assert report.degree == 8
    assert report.regathers == []
    assert (report.graphs, report.unshards) == (1, 1)
    assert all(e.shape == (1, 24, IMAGE + TEXT, 128, IMAGE + TEXT) for e in report.attention)
    assert all(e.exchange == "ulysses" and e.runner_up for e in report.attention)
    share_of_a_tensor = (IMAGE + TEXT) * 24 * 128 * 2 // 8
    assert {e.bytes_per_rank for e in report.attention} == {4 * share_of_a_tensor * 7 // 8}


@pytest.mark.parametrize(
    "degrees", [{"ring": 8}, {"kv_gather": 8}, {"ring": 2, "ulysses": 4}, {"ring": 2, "kv_gather": 2, "ulysses": 2}],
    ids=str,
)  # fmt: skip
def test_every_exchange_of_a_full_size_model_is_planned_on_cuda(degrees):
    model, inputs = flux_of_full_width(double_blocks=1, single_blocks=1)
    report = plan(model, kwargs=inputs, device="cuda", **degrees).report
    assert len(report.attention) == 2
    assert report.regathers == []
    if "ring" in degrees:
        assert {e.kernel for e in report.attention} == {"cuda_flash"}


def test_a_plan_for_cuda_differs_from_one_for_the_cpu_in_kernels_only():
    case = zoo.case("flux", "odd")
    model, inputs = case.build(), case.inputs()
    here, there = (plan(model, kwargs=inputs, ring=2, device=device).report for device in (None, "cuda"))
    assert {e.kernel for e in here.attention} == {"cpu_flash"}
    assert {e.kernel for e in there.attention} == {"cuda_efficient"}  # flash takes no float32
    assert exchanges(here) == exchanges(there) == ["ring"] * 4
    assert here.bytes_per_rank == there.bytes_per_rank


@pytest.mark.parametrize("name", zoo.CORE)
def test_every_model_is_planned_for_cuda(name):
    case = zoo.case(name, "odd")
    planned = plan(case.build(), kwargs=case.inputs(), sp=8, device="cuda")
    assert planned.report.graphs == len(planned.graphs) == 1
    assert len(planned.report.attention) >= case.num_blocks


@pytest.mark.parametrize("degrees", [{"sp": 2}, {"ring": 2}, {"kv_gather": 2, "ulysses": 2}], ids=str)
def test_a_plan_is_what_simulate_runs(degrees):
    model, x = SelfAttention(), tokens(7)
    planned = plan(model, (x,), **degrees)
    assert planned.report.to_dict() == simulate(model, (x,), **degrees).report.to_dict()
    assert any(node.target in ops.PROGRAMS for node in planned.graphs[0].graph.nodes)


def test_a_plan_is_refused_like_a_run():
    with pytest.raises(spcompile.UnsupportedGraphError, match="kernel cpu_flash does not run on cuda"):
        plan(SelfAttention(), (tokens(7),), ring=2, kernel="cpu_flash", device="cuda")
