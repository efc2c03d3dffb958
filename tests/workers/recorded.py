"""What ranks do under ``cudagraphs="piecewise"``, recorded on CPUs: named cases for test_cudagraphs.py."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import CASES, MESHES_OF, Moving, case, main
from helpers import C, SelfAttention, attend
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world

import spcompile
from spcompile.cudagraphs import Replayed
from spcompile.ops.mesh import AXES
from spcompile.pieces import Partition
from spcompile.testing import OnCPU, record_on_cpu, zoo

os.environ.setdefault("GROUP_TIMEOUT_S", "60")


class Meanwhile(nn.Module):
    """Keys travel while a feed-forward layer is computed; then attention again, and a view as output."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.ff = (nn.Linear(C, C) for _ in range(4))
        self.after = SelfAttention()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = attend(self.q(x), self.k(x), self.v(x)) + F.gelu(self.ff(x))
        z = self.after(y)
        return z.transpose(0, 1), z


def recording(model: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], spcompile.Backend, OnCPU]:
    backend = spcompile.backend(**({"inner": "eager", "cudagraphs": "piecewise"} | options))
    engine = record_on_cpu(backend)
    return torch.compile(model, backend=backend), backend, engine


def noise(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def steps(model: nn.Module, make: Callable[[int], dict[str, Any]], num: int = 6, **options: Any) -> dict[str, Any]:
    """Steps from graphs beside steps without; ``kept``: outputs of earlier steps are as they were."""
    model = model.eval().requires_grad_(False)
    fast, backend, engine = recording(model, **options)
    plain = torch.compile(model, backend=spcompile.backend(**({"inner": "eager"} | options)))
    different, kept = [], []
    for step in range(num):
        found, want = fast(**make(step)), plain(**make(step))
        for a, b in zip(_leaves(found), _leaves(want), strict=True):
            kept.append((a, a.clone()))
            if not torch.equal(a, b) or a.stride() != b.stride():
                different.append(step)
    report = backend.report()
    result = {
        "different": different,
        "kept": all(torch.equal(a, b) for a, b in kept),
        "replays": engine.num_replays,
        "pieces": sum(p.captured for p in report.pieces),
        "recordings": report.recordings,
    }
    backend.close()
    return result


def _leaves(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _steps_on(mesh: Sequence[int], inner: str) -> dict[str, Any]:
    degrees = dict(zip(AXES, mesh, strict=True))
    return steps(Meanwhile(), lambda step: {"x": noise(step, 2, 11, C)}, inner=inner, **degrees)


for _mesh in [m for meshes in MESHES_OF.values() for m in meshes]:
    for _inner in ("eager", "inductor"):
        CASES[f"steps_{'x'.join(map(str, _mesh))}_{_inner}"] = lambda m=_mesh, i=_inner: _steps_on(m, i)


@case
def gathers_that_start_early() -> dict[str, Any]:
    spcompile.overlap.travels_aside = lambda gather: True
    return _steps_on((1, 2, 1), "eager")


def _model(name: str) -> dict[str, Any]:
    which = zoo.case(name, "odd")
    inputs = which.inputs()

    def make(step: int) -> dict[str, Any]:
        def other(k: str, v: Any) -> Any:
            varies = isinstance(v, Tensor) and v.is_floating_point() and "mask" not in k
            return v + noise(step, *v.shape) if varies else v

        return {k: other(k, v) for k, v in inputs.items()}

    return steps(which.build(), make, num=4)


for _name in zoo.CORE:
    CASES[f"model_{_name}"] = lambda n=_name: _model(n)


@case
def inputs_of_any_strides() -> dict[str, Any]:
    class Two(SelfAttention):
        def forward(self, x: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
            return super().forward(x) * scale + bias

    def make(step: int) -> dict[str, Any]:
        x = noise(step, C, 11, 2).permute(2, 1, 0)
        return {"x": x, "bias": noise(step + 50, 1, 1, C).expand(2, 11, C), "scale": noise(step + 90, 22, C)[::2]}

    return steps(Two(), make)


@case
def buffers_and_inputs_that_are_written() -> dict[str, Any]:
    torch.manual_seed(0)
    model, other = Moving().eval().requires_grad_(False), Moving().eval().requires_grad_(False)
    other.load_state_dict(model.state_dict())
    fast, _, engine = recording(model, sp=2)
    equal = []
    for step in range(5):
        x, y = noise(step, 2, 9, C), noise(step, 2, 9, C)
        plain = torch.compile(other, backend=spcompile.backend(sp=2, inner="eager"))
        equal += [torch.equal(fast(x), plain(y)), torch.equal(x, y), torch.equal(model.average, other.average)]
    return {"equal": equal, "replays": engine.num_replays}


@case
def autocast_inside_the_model() -> dict[str, Any]:
    class Mixed(SelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = super().forward(x)
                y = y + F.linear(y, self.qkv.weight[:C])
            return super().forward(y.float())

    return steps(Mixed(), lambda step: {"x": noise(step, 2, 9, C)})


@case
def in_and_out_of_inference_mode() -> dict[str, Any]:
    model = SelfAttention().eval().requires_grad_(False)
    fast, _, _ = recording(model, sp=2)
    equal = []
    for step in range(6):
        x = noise(step, 2, 9, C)
        with torch.inference_mode(step % 2 == 0):
            equal.append(torch.allclose(fast(x), model(x), atol=1e-5))
    return {"equal": equal}


@case
def parameters_that_move() -> dict[str, Any]:
    """On one rank only the second time: every step sends the same, so nobody waits for nobody."""
    model = SelfAttention().eval().requires_grad_(False)
    fast, backend, _ = recording(model, sp=2)
    equal = []
    for step in range(12):
        if step == 4:
            model.qkv.weight.data = model.qkv.weight.data * 2
        if step == 7 and dist.get_rank() == 0:
            model.qkv.weight = nn.Parameter(model.qkv.weight.clone(), requires_grad=False)
        if step == 10:
            model.qkv.bias.add_(1)  # in place: no graph is recorded again
        x = noise(step, 2, 9, C)
        equal.append(torch.allclose(fast(x), model(x), atol=1e-5))
    return {"equal": equal, "recordings": backend.report().recordings}


@case
def more_shapes_than_the_limit() -> dict[str, Any]:
    model = SelfAttention().eval().requires_grad_(False)
    fast, backend, engine = recording(model, sp=2, max_recordings=2)
    equal, replays = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (8, 9, 10):
            for step in range(4):
                x = noise(step, 2, length, C)
                equal.append(torch.allclose(fast(x), model(x), atol=1e-5))
            replays.append(engine.num_replays)
    told = [str(w.message) for w in caught if issubclass(w.category, spcompile.RecordingLimitWarning)]
    text = str(backend.report())
    return {"equal": equal, "replays": replays, "told": told, "report": text, **backend.report().to_dict()["totals"]}


# what must be noticed


def _broken(spoil: Callable[[Partition], None], num: int = 4, checked: bool = True) -> dict[str, Any]:
    """Steps with a partition that has a defect: the error, or which steps were wrong."""
    original = Replayed.__init__
    checks = Replayed._checked

    def init(self: Replayed, partition: Partition, *args: Any) -> None:
        spoil(partition)
        original(self, partition, *args)

    Replayed.__init__ = init  # type: ignore[method-assign]
    if not checked:
        Replayed._checked = lambda self, i, arguments: self.recordings[i].replay()  # type: ignore[method-assign]
    model = SelfAttention().eval().requires_grad_(False)
    fast, _, _ = recording(model, ulysses=2)
    right, keep = [], []
    try:
        for step in range(num):
            x = noise(step, 2, 8, C)
            keep.append(torch.empty(2 * 12 * 8 * 2))  # so that no new memory lies where old memory did
            right.append(torch.allclose(fast(x), model(x), atol=1e-5))
    except Exception as error:
        return {"right": right, "raised": [k.__name__ for k in type(error).__mro__], "text": str(error)}
    finally:
        Replayed.__init__, Replayed._checked = original, checks  # type: ignore[method-assign]
    return {"right": right, "raised": []}


def _exchange_into_new_memory(partition: Partition) -> None:
    """A gap that returns its results instead of writing them where the next piece reads."""
    (gap,) = [p for p in partition.parts if not p.captured and p.writes]
    module, names, held = gap.module, list(gap.writes), []

    def forward(*args: Any) -> list[Tensor]:
        new = [torch.empty_strided(b.shape, b.stride(), dtype=b.dtype) for b in args[len(args) - len(names) :]]
        original(*args[: len(args) - len(names)], *new)
        held.append(new)  # the allocator must not give the same address again
        return new

    original, module.forward = module.forward, forward
    gap.returns.extend(names)
    partition.values.update({n: replace(partition.values[n], kind="loose") for n in names})
    find = Replayed._find

    def find_new(self: Replayed, name: str, given: Any, passed: Any, captured: bool) -> Any:
        return passed[name] if name in passed else find(self, name, given, passed, captured)

    partition.parts[2] = replace(partition.parts[2])
    Replayed._find = find_new  # type: ignore[method-assign]


@case
def an_exchange_that_returns_new_memory() -> dict[str, Any]:
    find = Replayed._find
    try:
        return {
            "checked": _broken(_exchange_into_new_memory),
            "unchecked": _broken(_exchange_into_new_memory, checked=False),
        }
    finally:
        Replayed._find = find  # type: ignore[method-assign]


def _piece_into_new_memory(partition: Partition) -> None:
    """A piece that returns its last result instead of writing it into its buffer."""
    graph = partition.parts[2].module.graph
    (copy,) = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    graph.output_node().args = ((copy.args[1],),)
    graph.erase_node(copy)
    partition.parts[2].module.recompile()


def _piece_that_writes_elsewhere(partition: Partition) -> None:
    """A piece that computes its result and leaves it where it is."""
    _piece_into_new_memory(partition)
    partition.parts[2].module.graph.output_node().args = ((),)
    partition.parts[2].module.recompile()


@case
def a_piece_that_returns_new_memory() -> dict[str, Any]:
    return {
        "returned": _broken(_piece_into_new_memory),
        "left": _broken(_piece_that_writes_elsewhere),
    }


def _one_buffer_for_all(partition: Partition) -> None:
    """Values that are needed at once share a buffer."""
    largest = max(range(len(partition.slots)), key=partition.slots.__getitem__)
    for name, value in partition.values.items():
        if value.slot is not None:
            partition.values[name] = replace(value, slot=largest)


@case
def buffers_that_are_shared_too_early() -> dict[str, Any]:
    return _broken(_one_buffer_for_all)


# the rest


@case
def sends_by_way_of_the_host() -> dict[str, Any]:
    """As gloo needs it of CUDA tensors."""
    spcompile.ops.wire._sends_host_memory_only = lambda group, x: True
    model = SelfAttention().eval().requires_grad_(False).double()
    fast = torch.compile(model, backend=spcompile.backend(ring=2, inner="eager"))
    x = noise(0, 2, 9, C).double()
    return {"off": float((fast(x) - model(x)).abs().max())}


@case
def opcheck_into() -> dict[str, Any]:
    from test_into import EXCHANGES, places

    group, rank, checked = dist.group.WORLD.group_name, dist.get_rank(), {}
    for name, make in EXCHANGES.items():
        for mesh in MESHES_OF[dist.get_world_size()]:
            example = make(mesh=mesh)
            args = (*example.ranks[rank], group)
            want = example.op(*args)
            outs = places(want)
            variant = spcompile.ops.INTO[example.op._opoverload]
            checked[f"{name} {mesh}"] = sorted(set(torch.library.opcheck(variant, (*args, *outs)).values()))
            variant(*args, *outs)
            wanted = want if isinstance(want, tuple) else (want,)
            if not all(torch.equal(o, w) for o, w in zip(outs, wanted, strict=True)):
                checked[f"{name} {mesh}"].append("DIFFERENT")
    return checked


@case
def full_on_gloo() -> dict[str, Any]:
    fast, _, _ = recording(SelfAttention().eval().requires_grad_(False), kv_gather=2, cudagraphs="full")
    try:
        fast(noise(0, 2, 9, C))
    except spcompile.SPError as error:
        return {"text": str(error)}
    return {"text": ""}


@case
def real_graphs_on_cpus() -> dict[str, Any]:
    model = SelfAttention().eval().requires_grad_(False)
    try:
        torch.compile(model, backend=spcompile.backend(sp=2, cudagraphs="piecewise"))(noise(0, 2, 9, C))
    except spcompile.SPConfigError as error:
        return {"text": str(error)}
    return {"text": ""}


@case
def closed_and_opened_again() -> dict[str, Any]:
    """Twice, on sub-groups where there are enough ranks; the second backend shares the first one's."""
    degrees = {"ulysses": 2} if dist.get_world_size() == 2 else {"ring": 2, "ulysses": 2}
    model, right, groups = SelfAttention().eval().requires_grad_(False).double(), [], []
    x = noise(0, 2, 9, C).double()
    for _ in range(2):
        first, backend, _ = recording(model, **degrees)
        second, other, _ = recording(model, **degrees)
        for run in (first, second) * 3:
            right.append(torch.allclose(run(x), model(x), atol=1e-9))
        groups.append(len(_world.pg_map))
        backend.close()
        backend.close()
        groups.append(len(_world.pg_map))
        right.append(torch.allclose(second(x), model(x), atol=1e-9))
        with other:
            pass
        groups.append(len(_world.pg_map))
        for closed in (first, second):
            try:
                closed(x)
            except spcompile.ClosedError:
                right.append(True)
            else:
                right.append(False)
    return {"right": right, "groups": groups}


if __name__ == "__main__":
    main()
