"""What ranks do on GPUs: named cases for test_gpu.py, ``on_gpu.py FOLDER BACKEND NAME...`` under torchrun.

With gloo all ranks may share one GPU; with NCCL each has its own.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from helpers import C, SelfAttention
from torch import Tensor, nn

import spcompile
from spcompile.testing import zoo

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NUM_STEPS = 20


class Immediate:
    """An engine that records nothing: a piece is run again as it was compiled."""

    device = "cuda"

    def capture(self, run: Callable[..., Any], args: Sequence[Tensor]) -> Any:
        class Again:
            def replay(self) -> None:
                run(*args)

            def release(self) -> None:
                pass

        return Again()


def noise(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step)).cuda()


def started(backend: str, folder: Path, name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    store = dist.FileStore(str(folder / f"{name}.store"), SIZE)
    dist.init_process_group(backend, store=store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=120))


def small(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Sequential(SelfAttention(), nn.GELU(), SelfAttention()).to("cuda", dtype).eval().requires_grad_(False)


def steps(form: str, inner: str, **degrees: Any) -> dict[str, Any]:
    """Replays beside the same pieces run as they were compiled; with ``inner="eager"`` beside no pieces at all."""
    model = small()
    backend = spcompile.backend(inner=inner, cudagraphs=form, **degrees)
    fast = torch.compile(model, backend=backend)
    if inner == "eager":
        other = spcompile.backend(inner=inner, **degrees)
    else:
        other = spcompile.backend(inner=inner, cudagraphs=form, **degrees)
        other.engine = Immediate()
    plain = torch.compile(copy.deepcopy(model), backend=other)
    different, kept = [], []
    for step in range(NUM_STEPS):
        x = noise(step, 2, 77, C).bfloat16()
        found, want = fast(x), plain(x)
        kept.append((found, found.clone()))
        if not torch.equal(found, want):
            different.append(step)
    report = backend.report()
    backend.close()
    other.close()
    return {
        "different": different,
        "kept": all(torch.equal(a, b) for a, b in kept),
        "pieces": sum(p.captured for p in report.pieces),
        "recordings": report.recordings,
    }


def model_steps(name: str, form: str) -> dict[str, Any]:
    case = zoo.case(name, "odd")
    model = case.build().cuda().requires_grad_(False)
    inputs = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in case.inputs().items()}
    backend = spcompile.backend(cudagraphs=form)
    fast, errors = torch.compile(model, backend=backend), []
    for _ in range(5):
        found, want = fast(**inputs)[0], model(**inputs)[0]
        errors.append(float((found - want).abs().max() / want.abs().max()))
    backend.close()
    return {"off": max(errors), "tolerance": case.tolerance}


def recorded_again(form: str) -> dict[str, Any]:
    """New shapes, then parameters that move: by ``.data``, by a new parameter, and in place."""
    model = small(torch.float32)
    backend = spcompile.backend(inner="eager", cudagraphs=form)
    fast, off, recordings = torch.compile(model, backend=backend), [], []
    for length in (16, 24):
        for step in range(4):
            x = noise(step, 2, length, C)
            off.append(float((fast(x) - model(x)).abs().max()))
        recordings.append(backend.report().recordings)
    for change in (
        lambda m: setattr(m.qkv.weight, "data", m.qkv.weight.data * 2),
        lambda m: setattr(m.qkv, "weight", nn.Parameter(m.qkv.weight * 2, requires_grad=False)),
        lambda m: m.qkv.bias.add_(1),
    ):
        change(model[0])
        for step in range(3):
            x = noise(step, 2, 24, C)
            off.append(float((fast(x) - model(x)).abs().max()))
        recordings.append(backend.report().recordings)
    backend.close()
    return {"off": max(off), "recordings": recordings}


def torn_down(form: str, close_first: bool) -> dict[str, Any]:
    backend = spcompile.backend(inner="eager", cudagraphs=form)
    model = small()
    fast = torch.compile(model, backend=backend)
    for step in range(4):
        fast(noise(step, 2, 16, C).bfloat16())
    if close_first:
        backend.close()
    dist.destroy_process_group()
    backend.close()
    before = torch.cuda.memory_allocated()
    del fast, model
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    try:
        backend(None, [])  # type: ignore[arg-type]
    except spcompile.ClosedError:
        return {"closed": True, "freed": before >= torch.cuda.memory_allocated()}
    return {"closed": False}


def refused(form: str) -> dict[str, Any]:
    fast = torch.compile(small(), backend=spcompile.backend(cudagraphs=form))
    try:
        fast(noise(0, 2, 16, C).bfloat16())
    except spcompile.SPError as error:
        return {"text": str(error)}
    return {"text": ""}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    f"{name}_{form}": lambda f=form, run=run: run(f)
    for form in ("piecewise", "full")
    for name, run in {
        "ulysses": lambda f: steps(f, "eager", ulysses=SIZE),
        "kv_gather": lambda f: steps(f, "eager", kv_gather=SIZE),
        "ring": lambda f: steps(f, "eager", ring=SIZE),
        "ulysses_inductor": lambda f: steps(f, "inductor", ulysses=SIZE),
        "kv_gather_inductor": lambda f: steps(f, "inductor", kv_gather=SIZE),
        "flux": lambda f: model_steps("flux", f),
        "wan": lambda f: model_steps("wan", f),
        "recorded_again": recorded_again,
        "closed_first": lambda f: torn_down(f, close_first=True),
        "destroyed_first": lambda f: torn_down(f, close_first=False),
        "refused": refused,
    }.items()
}


if __name__ == "__main__":
    folder, backend = Path(sys.argv[1]), sys.argv[2]
    for name in sys.argv[3:]:
        started(backend, folder, name)
        try:
            with torch.no_grad():
                result = CASES[name]()
        except BaseException:
            result = {"error": traceback.format_exc()}
        (folder / f"{name}.{RANK}.json").write_text(json.dumps(result))
        if dist.is_initialized():
            dist.destroy_process_group()
