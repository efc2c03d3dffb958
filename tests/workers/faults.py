"""What goes wrong between real ranks: named cases for test_faults.py, started as workers/cases.py is."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from helpers import SelfAttention
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

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
    return torch.compile(model, backend=spcompile.backend(**({"inner": "eager", "timeout": SHORT} | options)))


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
def one_has_a_warm_cache() -> dict[str, Any]:
    """Inductor's, from an earlier run; the other rank compiles for seconds meanwhile."""
    model, x, first = seeded(), noise(0), dist.get_rank() == 0
    hits: list[int] = []
    with fresh_cache():
        compiled(model, inner="inductor", timeout=60)(x)
        torch._dynamo.reset()
        with contextlib.nullcontext() if first else fresh_cache():
            counters.clear()
            got = compiled(model, inner="inductor", timeout=60)(x)
            hits.append(counters["inductor"]["fxgraph_cache_hit"])
    return {"hits": hits, "right": bool(torch.allclose(got, model(x), atol=1e-5))}


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
def unset_memory_is_nan() -> dict[str, Any]:
    """7 tokens on two ranks, through what is really sent: pads and buffers must reach no token."""
    model, kernel = seeded(), torch.randn(24, 24, 3, generator=torch.Generator().manual_seed(1))

    def mixed(x: torch.Tensor) -> list[torch.Tensor]:
        h = 1 / (x + model(x))  # infinite or NaN in pads
        convolved = nn.functional.conv1d(h.mT, kernel, padding=1).mT
        return [
            model(h.clamp(-3, 3)),
            h.softmax(1),
            h.cumsum(1),
            h.mean(1),
            h.amax(1),
            h.norm(dim=1),
            convolved,
            h.flip(1),
        ]

    off = {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    for exchange in ("ulysses", "kv_gather", "ring"):
        found, want = compiled(mixed, timeout=60, **{exchange: 2})(noise(0)), mixed(noise(0))
        off[exchange] = max(float(((a - b).abs() / b.abs().max()).max()) for a, b in zip(found, want, strict=True))
    torch.use_deterministic_algorithms(False)
    return off


@case
def different_constants() -> dict[str, Any]:
    model = seeded()
    scale = float(dist.get_rank())
    return attempt(lambda: compiled(lambda x: model(x + torch.tensor([scale, 1.0]).sum()))(noise(0)))


@case
def histories_that_differ() -> dict[str, Any]:
    """One rank alone has seen two resolutions and three scales: what it compiles from then on is dynamic."""
    inner = seeded()

    def model(x: torch.Tensor, scale: float, tail: int) -> torch.Tensor:
        return inner(x * scale)[:, tail:]

    if dist.get_rank():
        alone = torch.compile(model, backend="eager")
        for length, scale, tail in ((5, 0.5, 0), (6, 0.6, 1), (8, 0.7, 2)):
            alone(noise(0, length), scale, tail)
    call = compiled(model, timeout=60)
    steps = [(noise(0, n), scale, tail) for n, scale, tail in ((7, 0.9, 1), (9, 1.1, 2), (7, 0.9, 1), (11, 0.9, 3))]
    return {"off": max(float((call(*step) - model(*step)).abs().max()) for step in steps)}


@case
def automatic_dynamic_shapes() -> dict[str, Any]:
    model = seeded()
    graphs: list[int] = []

    def inner(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(sum(isinstance(x, torch.SymInt) for x in inputs))
        return module.forward

    call = compiled(model, inner=inner, timeout=60)
    lengths = (7, 9, 11, 7, 9, 11)
    return {
        "off": max(float((call(x) - model(x)).abs().max()) for x in (noise(0, n) for n in lengths)),
        "graphs": graphs,
    }


def _raises_on(ranks: tuple[int, ...], error: Exception, at_run_time: bool = False, **options: Any) -> dict[str, Any]:
    """The inner backend raises: what this rank is told."""
    model = seeded()

    def inner(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            raise error

        if dist.get_rank() not in ranks:
            return module.forward
        if at_run_time:
            return run
        raise error

    return attempt(lambda: compiled(model, inner=inner, timeout=60, **options)(noise(0)))


@case
def out_of_memory_in_the_inner_compile_of_one() -> dict[str, Any]:
    return _raises_on((1,), torch.OutOfMemoryError("tried to allocate 3 GiB")) | {"goes_on": goes_on()}


@case
def out_of_memory_in_the_inner_compile_of_all() -> dict[str, Any]:
    return _raises_on((0, 1), MemoryError("no more")) | {"goes_on": goes_on()}


@case
def the_inner_backend_of_one_raises() -> dict[str, Any]:
    return _raises_on((1,), KeyError("nothing by that name")) | {"goes_on": goes_on()}


@case
def dynamo_fails_on_one() -> dict[str, Any]:
    """A weight on another device than the input: nothing gets as far as the backend."""
    model = seeded().to("meta" if dist.get_rank() else "cpu")
    found = attempt(lambda: compiled(model)(noise(0)))
    if dist.get_rank():
        time.sleep(SHORT + 2)
    return found | {"goes_on": goes_on()}


@case
def refusals_suppressed() -> dict[str, Any]:
    """Dynamo is told to run what it cannot compile: one rank refuses, so none shares."""
    first, second = seeded(1), seeded(2)

    def model(x: torch.Tensor) -> torch.Tensor:
        return second(first(x).flip(1))

    off: list[float] = []
    with torch._dynamo.config.patch(suppress_errors=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call = compiled(model, strict=dist.get_rank() == 1)
        found = attempt(lambda: off.append(float((call(noise(0)) - model(noise(0))).abs().max())))
    told = [str(w.message) for w in caught if w.category.__name__ == "UnshardedWarning"]
    return found | {"off": off, "told": told, "goes_on": goes_on()}


def _one_compiles_while_the_other_runs(**options: Any) -> dict[str, Any]:
    """In a group of its own, then in another one."""
    model, group = seeded(), dist.new_group([0, 1])
    call = compiled(model, mesh=group, **options)
    call(noise(0, 7))
    found = attempt(lambda: call(noise(0, 9 if dist.get_rank() else 7)))
    time.sleep(SHORT)  # alive while the other waits
    torch._dynamo.reset()
    if "go on with a new one" not in "".join(broadcast(found["text"])):
        again = compiled(model, mesh=group, timeout=60, **options)
    else:
        again = compiled(model, mesh=dist.new_group([0, 1]), timeout=60)
    return found | {"goes_on": bool(torch.allclose(again(noise(5, 11)), model(noise(5, 11)), atol=1e-5))}


def broadcast(text: str) -> list[str]:
    """Every rank's text."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    return everyone


@case
def one_compiles_while_the_other_runs() -> dict[str, Any]:
    return _one_compiles_while_the_other_runs(kv_gather=2)


@case
def one_compiles_while_the_other_runs_ulysses() -> dict[str, Any]:
    return _one_compiles_while_the_other_runs(ulysses=2)


@case
def one_compiles_while_the_other_runs_sockets() -> dict[str, Any]:
    with mock.patch("spcompile.ops.hostmem.of", return_value=None):
        return _one_compiles_while_the_other_runs(ulysses=2)


@case
def one_compiles_while_the_other_runs_ring() -> dict[str, Any]:
    return _one_compiles_while_the_other_runs(ring=2)


@case
def in_and_out_of_inference_mode() -> dict[str, Any]:
    """The first exchange of a group in it, later ones not, and none at all to send."""
    right = []
    for degrees in ({"kv_gather": 2}, {"ulysses": 2}, {"ring": 2}):
        model = seeded()
        call = compiled(model, mesh=dist.new_group([0, 1]), timeout=60, **degrees)
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            for x in (noise(1), noise(1, 1), noise(1)[:0]):
                with mode():
                    right.append(bool(torch.allclose(call(x), model(x), atol=1e-5)))
    return {"right": right}


@case
def groups_that_come_and_go() -> dict[str, Any]:
    """Threads, files and memory of a group go with it."""

    def held() -> list[int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:spcompile")
        return [threading.active_count(), len(os.listdir("/proc/self/fd")), maps]

    counts = []
    for _ in range(6):
        group = dist.new_group([0, 1])
        right = torch.allclose(compiled(seeded(), mesh=group, timeout=60)(noise(1)), seeded()(noise(1)), atol=1e-5)
        assert right
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        torch._dynamo.reset()
        counts.append(held())
    return {"counts": counts}


@case
def autocast_on_one() -> dict[str, Any]:
    with torch.autocast("cpu", torch.bfloat16, enabled=dist.get_rank() == 1):
        found = attempt(lambda: compiled(seeded(), timeout=60)(noise(0)))
    return found | {"goes_on": goes_on()}


@case
def known_graphs_in_different_orders() -> dict[str, Any]:
    """Both have compiled both; then the same again in one order."""
    model, rank = seeded(), dist.get_rank()
    call = compiled(model, kv_gather=2)
    for length in (7, 9):
        call(noise(0, length))
    found = [attempt(lambda n=n: call(noise(0, n))) for n in ((7, 9) if rank else (9, 7))]
    right = bool(torch.allclose(call(noise(1, 9)), model(noise(1, 9)), atol=1e-5))
    return {"attempts": found, "right": right, "goes_on": goes_on()}


@torch.library.custom_op("spcompile_faults::may_raise", mutates_args=())
def may_raise(x: torch.Tensor) -> torch.Tensor:
    if RAISES:
        raise ValueError("out of something, once")
    return x.clone()


@may_raise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


RAISES: list[bool] = []


@case
def one_raises_between_exchanges_and_goes_on() -> dict[str, Any]:
    """Later calls must not meet the exchanges of that call."""
    first, second = seeded(1), seeded(2)

    def model(x: torch.Tensor) -> torch.Tensor:
        return second(may_raise(first(x)))

    call = compiled(model, kv_gather=2, timeout=60)
    call(noise(0))
    RAISES[:] = [True] * dist.get_rank()
    found = attempt(lambda: call(noise(1)))
    RAISES.clear()
    right = [bool(torch.allclose(call(noise(i)), model(noise(i)), atol=1e-5)) for i in range(2, 6)]
    return found | {"right": right, "goes_on": goes_on()}


@case
def one_is_past_its_limit() -> dict[str, Any]:
    """It runs unsharded, and right; the other is told."""
    model = seeded()
    call = compiled(model)
    call(noise(0, 7))
    off: list[float] = []
    with torch._dynamo.config.patch(recompile_limit=8 if dist.get_rank() else 1):
        found = attempt(lambda: off.append(float((call(noise(0, 9)) - model(noise(0, 9))).abs().max())))
    if not dist.get_rank():
        time.sleep(SHORT + 2)
    return found | {"off": off, "goes_on": goes_on()}


@case
def the_inner_backend_of_one_raises_at_run_time() -> dict[str, Any]:
    """In a group of its own, whose timeout is short: one rank is left in a collective that nobody joins."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SHORT))
    found = _raises_on((1,), ValueError("a kernel failed"), at_run_time=True, mesh=group)
    time.sleep(2 * SHORT * dist.get_rank())  # alive while the other waits
    return found


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
