"""What goes wrong between real ranks: named cases for test_faults.py, started as workers/cases.py is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from helpers import SelfAttention
from torch import nn

import spcompile

CASES: dict[str, Callable[[], dict[str, Any]]] = {}
SHORT = 3.0  # seconds that a rank waits for the others


def case(f: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    CASES[f.__name__] = f
    return f


def seeded(seed: int = 0) -> SelfAttention:
    torch.manual_seed(seed)
    return SelfAttention().eval().requires_grad_(False)


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=spcompile.backend(inner="eager", **({"timeout": SHORT} | options)))


def noise(seed: int, length: int = 7) -> torch.Tensor:
    return torch.randn(2, length, 24, generator=torch.Generator().manual_seed(seed))


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call raised, and after how many seconds."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"raised": kinds, "text": str(error), "seconds": time.monotonic() - start}
    return {"raised": [], "text": "", "seconds": time.monotonic() - start}


def goes_on() -> bool:
    """Is the group still of use? Compiled as if for the first time: the ranks' histories differ by now."""
    torch._dynamo.reset()
    model, x = seeded(), noise(5, 11)
    return bool(torch.allclose(compiled(model, timeout=60)(x), model(x), atol=1e-5))


@case
def different_noise() -> dict[str, Any]:
    model = seeded()
    return attempt(lambda: compiled(model)(noise(dist.get_rank()))) | {"goes_on": goes_on()}


@case
def different_weights() -> dict[str, Any]:
    model = seeded(dist.get_rank())
    return attempt(lambda: compiled(model)(noise(0))) | {"goes_on": goes_on()}


@case
def different_noise_unchecked() -> dict[str, Any]:
    model = seeded()
    return attempt(lambda: compiled(model, check="off")(noise(dist.get_rank())))


@case
def different_noise_later() -> dict[str, Any]:
    model = seeded()
    first, always = compiled(model), compiled(model, check="always")
    first(noise(0)), always(noise(0))
    unnoticed = attempt(lambda: first(noise(dist.get_rank())))
    return attempt(lambda: always(noise(dist.get_rank()))) | {"unnoticed": unnoticed["raised"] == []}


@case
def different_generators() -> dict[str, Any]:
    inner = seeded()
    torch.manual_seed(dist.get_rank())
    call = compiled(lambda x: inner(inner(x) + torch.randn_like(x)))
    return attempt(lambda: call(noise(0)))


@case
def equal_generators() -> dict[str, Any]:
    inner = seeded()
    torch.manual_seed(3)
    out = compiled(lambda x: inner(inner(x) + torch.randn_like(x)))(noise(0))
    torch.manual_seed(3)
    want = inner(inner(noise(0)) + torch.randn(2, 7, 24))
    return {"off": float((out - want).abs().max())}


@case
def different_options() -> dict[str, Any]:
    model = seeded()
    kernel = "math" if dist.get_rank() else "auto"
    return attempt(lambda: compiled(model, kernel=kernel)(noise(0))) | {"goes_on": goes_on()}


@case
def one_refuses() -> dict[str, Any]:
    model = seeded()
    flips = [lambda x: model(model(x)), lambda x: model(model(x).flip(1))][dist.get_rank()]
    return attempt(lambda: compiled(flips, strict=True)(noise(0))) | {"goes_on": goes_on()}


@case
def one_never_comes() -> dict[str, Any]:
    model = seeded()
    if dist.get_rank():
        found: dict[str, Any] = {"raised": [], "text": "", "seconds": 0.0}
        time.sleep(SHORT + 2)
    else:
        found = attempt(lambda: compiled(model)(noise(0)))
    return found | {"goes_on": goes_on()}


@case
def resolutions_in_different_orders() -> dict[str, Any]:
    model = seeded()
    call = compiled(model)
    lengths = [5, 9][:: -1 if dist.get_rank() else 1]
    return attempt(lambda: [call(noise(0, n)) for n in lengths]) | {"goes_on": goes_on()}


@case
def verified() -> dict[str, Any]:
    model = seeded()
    backend = spcompile.backend(inner="eager", verify="first")
    call = torch.compile(model, backend=backend)
    call(noise(0)), call(noise(1))
    return {"verified": backend.report().verified}


@case
def first_block_cache() -> dict[str, Any]:
    """Skips its blocks when the first changes little: decided in Python, on full values."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = seeded(1), seeded(2)
            self.last: tuple[torch.Tensor, torch.Tensor] | None = None
            self.skipped = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            if self.last is not None and (y - self.last[0]).abs().mean() < 0.05:
                self.skipped += 1
                return y + self.last[1]
            rest = self.rest(y)
            self.last = (y, rest)
            return y + rest

    alone, model = Cached(), Cached()
    shared = compiled(model, timeout=60)
    off = 0.0
    for step in (0.0, 0.001, 1.0, 1.001, 5.0):
        x = noise(0) + step
        off = max(off, float((shared(x) - alone(x)).abs().max()))
    return {"off": off, "skipped": [model.skipped, alone.skipped]}


@case
def one_compiles_while_the_other_runs() -> dict[str, Any]:
    """The last of its launch: one rank is left in a collective that nobody joins."""
    model = seeded()
    call = compiled(model)
    call(noise(0, 7))
    return attempt(lambda: call(noise(0, 9 if dist.get_rank() else 7)))


@case
def one_is_killed() -> dict[str, Any]:
    """The last of its launch."""
    model = seeded()
    call = compiled(model)
    call(noise(0))
    if dist.get_rank():
        os._exit(0)
    return attempt(lambda: [call(noise(0)) for _ in range(100)])


def main() -> None:
    import json
    import traceback

    folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["GROUP_TIMEOUT_S"])))
    for name in names:
        try:
            torch._dynamo.reset()  # each case compiles anew, far from any limit
            result = CASES[name]()
        except Exception:
            result = {"error": traceback.format_exc()}
        (Path(folder) / f"{name}.{dist.get_rank()}.json").write_text(json.dumps(result))
    os._exit(0)  # a group that lost a rank may not be torn down in order


if __name__ == "__main__":
    main()
