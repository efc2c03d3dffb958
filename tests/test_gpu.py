"""What only a GPU can show. Skipped without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from spcompile.ops import kernels
from spcompile.testing import simulate, zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
ON_GPU = [n for n, k in kernels.KERNELS.items() if "cuda" in k.devices and not k.missing()]


@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("causal", [False, True])
def test_each_kernel_is_as_exact_as_its_dtype(name, causal):
    make = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, 4, 192, 64, generator=make, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal, scale=0.125)
    out, lse = kernels.attend(name, q, k, v, None, causal, 0.125, True)
    loose = 0.05 if name.startswith("sage") else 8 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(out.double(), want, rtol=0, atol=loose * want.abs().max().item())
    if kernels.KERNELS[name].returns_lse:
        scores = q.double() @ k.double().transpose(-1, -2) * 0.125
        if causal:
            scores = scores.masked_fill(~torch.ones(192, 192, device="cuda", dtype=torch.bool).tril(), -torch.inf)
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=0.05)


@pytest.mark.parametrize("name", ["flux", "wan", "sd3"])
@pytest.mark.parametrize("degrees", [{"sp": 2}, {"ring": 4}, {"ring": 2, "ulysses": 2}], ids=str)
def test_models_are_exact_on_a_gpu(name, degrees):
    case = zoo.case(name, "odd")
    model = case.build().cuda()
    inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.inputs().items()}
    with torch.no_grad():
        want = model(**inputs)[0]
    for out in simulate(model, kwargs=inputs, **degrees).outputs:
        torch.testing.assert_close(out[0], want, rtol=0, atol=1e-5 * want.abs().max().item())


# CUDA graphs: what each rank does is in workers/on_gpu.py

EXCHANGES = ("ulysses", "kv_gather", "ring", "ulysses_inductor", "kv_gather_inductor")
BOTH = (*EXCHANGES, "flux", "wan", "recorded_again", "closed_first")
ON_ONE = (*(f"{name}_piecewise" for name in (*BOTH, "destroyed_first")), "refused_full")
ON_SEVERAL = tuple(f"{name}_{form}" for form in ("piecewise", "full") for name in BOTH)
ON_SEVERAL += ("destroyed_first_piecewise",)  # graphs that hold NCCL's exchanges must go before its communicators
several_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA GPUs")


@cache
def launch(backend: str) -> dict[str, list[dict[str, Any]]]:
    """Two ranks, on one GPU with gloo and on two with NCCL; per case, what each measured."""
    names = ON_ONE if backend == "gloo" else ON_SEVERAL
    worker = str(Path(__file__).parent / "workers" / "on_gpu.py")
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                   worker, folder, backend, *names]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if backend == "gloo":
            environment |= {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
        try:
            log = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540).stderr
        except subprocess.TimeoutExpired as expired:
            log = f"stopped\n{(expired.stderr or b'').decode()}"

        def read(name: str, rank: int) -> dict[str, Any]:
            file = Path(folder) / f"{name}.{rank}.json"
            return json.loads(file.read_text()) if file.exists() else {"error": f"not finished\n{log[-3000:]}"}

        assert "destroy_process_group() was not called" not in log
        return {name: [read(name, rank) for rank in (0, 1)] for name in names}


def on(backend: str, name: str) -> list[dict[str, Any]]:
    results = launch(backend)[name]
    failures = [r["error"] for r in results if "error" in r]
    assert not failures, "\n".join(failures)
    return results


every_engine = pytest.mark.parametrize(
    ("backend", "form"),
    [
        ("gloo", "piecewise"),
        pytest.param("nccl", "piecewise", marks=several_gpus),
        pytest.param("nccl", "full", marks=several_gpus),
    ],
)


@every_engine
@pytest.mark.parametrize("name", EXCHANGES)
def test_twenty_replays_are_bitwise_what_runs_without_graphs(backend, form, name):
    for result in on(backend, f"{name}_{form}"):
        assert result["different"] == []
        assert result["kept"], "an output of an earlier step was overwritten"
        assert result["recordings"] == 1
        assert (result["pieces"] == 1) == (form == "full")


@every_engine
@pytest.mark.parametrize("name", ["flux", "wan"])
def test_models_from_graphs_are_exact(backend, form, name):
    for result in on(backend, f"{name}_{form}"):
        assert result["off"] < 1e-4


@every_engine
def test_new_shapes_and_moved_parameters_are_recorded_again(backend, form):
    for result in on(backend, f"recorded_again_{form}"):
        assert result["off"] < 1e-4
        assert result["recordings"] == [1, 2, 3, 4, 4]


@every_engine
def test_closing_before_the_group_goes(backend, form):
    assert all(result == {"closed": True, "freed": True} for result in on(backend, f"closed_first_{form}"))


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=several_gpus)])
def test_closing_after_the_group_went(backend):
    assert all(result["closed"] for result in on(backend, "destroyed_first_piecewise"))


def test_full_graphs_on_gloo_are_refused():
    for result in on("gloo", "refused_full"):
        assert "an exchange through a group that is not NCCL's runs on the host" in result["text"]
