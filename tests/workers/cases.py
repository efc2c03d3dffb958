"""What every rank of a real group runs: named cases, each of which returns measurements as plain numbers.

Started by `launch` in test_gloo.py: ``cases.py FOLDER NAME...`` under torchrun. A rank writes
``FOLDER/NAME.RANK.json`` per case: what the case returned, or the traceback under ``error``. Asserting is left
to the tests.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import caches
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from helpers import SelfAttention, attend, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import spcompile
from spcompile.ops.mesh import AXES
from spcompile.testing import zoo

CASES: dict[str, Callable[[], dict[str, Any]]] = {}
MESHES_OF = {
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    4: [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 1)],
}
"""``(ring, kv_gather, ulysses)`` of as many ranks."""


def case(f: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    CASES[f.__name__] = f
    return f


def compiled(model: nn.Module, inner: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=spcompile.backend(inner=inner, **options))


def off(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest expected value."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs)


def off_by_scale(found: Any, expected: Any) -> float:
    """The largest difference of tensors, relative to the largest value in all of them."""
    tensors = [[t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)] for x in (found, expected)]
    scale = max(float(t.abs().max()) for t in tensors[1])
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(*tensors, strict=True)) / scale


class Normed(nn.Module):
    """Batch norm over the tokens between two attentions, in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = SelfAttention(), nn.BatchNorm1d(24), SelfAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x).mT).mT)


class WithConstants(nn.Module):
    """A mask and factors that are made of numbers in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 72)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
        mask[-2:] = -100.0
        y = attend(*self.qkv(x).chunk(3, -1), attn_mask=mask) * torch.tensor(2.0, dtype=x.dtype)
        y[:, 1:3] = 0.5
        return y + torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype).repeat(8)


class Moving(nn.Module):
    """Writes a buffer and an input from what attention gives."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SelfAttention()
        self.register_buffer("average", torch.zeros(2, 24))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.average.mul_(0.5).add_(y.mean(1), alpha=0.5)
        x[:, 1:3] += y[:, 2:4]
        return y + self.average[:, None]


# ops


@case
def ops_equal_the_reference() -> dict[str, Any]:
    from test_ops import EXAMPLES, MEMORY

    group, rank, size = dist.group.WORLD.group_name, dist.get_rank(), dist.get_world_size()
    different = []
    for name, make in EXAMPLES.items():
        for memory in MEMORY:
            for mesh in MESHES_OF[size]:
                example = make(mesh=mesh, memory=memory)
                found = example.op(*example.ranks[rank], group)
                different += [f"{name} {mesh} {memory.__name__}: {d}" for d in example.differences(rank, found)]
    return {"ops": len(EXAMPLES), "different": different}


@case
def opcheck() -> dict[str, Any]:
    from test_ops import EXAMPLES

    checked = {}
    for name, make in EXAMPLES.items():
        for mesh in MESHES_OF[dist.get_world_size()]:
            example = make(mesh=mesh)
            args = (*example.ranks[dist.get_rank()], dist.group.WORLD.group_name)
            checked[f"{name} {mesh}"] = sorted(set(torch.library.opcheck(example.op, args).values()))
    return checked


# small models


@case
def several_resolutions() -> dict[str, Any]:
    """More of them than Dynamo recompiles for; past its limit it runs the model as it is."""
    model = SelfAttention().double()
    fast = compiled(model, inner="eager")
    errors = []
    with torch.no_grad():
        for num in (12, 20, 9, 12, *range(30, 40), 12):
            x = tokens(num).double()
            errors.append(off(fast(x), model(x)))
    return {"off": max(errors)}


@case
def dynamic_shapes_under_inductor() -> dict[str, Any]:
    model = SelfAttention()
    errors = {}
    with torch.no_grad():
        for dynamic in (None, True):
            torch._dynamo.reset()
            fast = torch.compile(model, backend=spcompile.backend(), dynamic=dynamic)
            for num in (8, 11):
                x = tokens(num)
                errors[f"{dynamic} {num}"] = off(fast(x), model(x))
    return {"off": max(errors.values())}


@case
def writes() -> dict[str, Any]:
    """Buffers and inputs hold on every rank what they hold without compiling, after several steps."""
    model, xs = Moving().double(), [tokens(7).double() for _ in range(2)]
    eager, eager_xs = copy.deepcopy((model, xs))
    fast = compiled(model)
    with torch.no_grad():
        found, expected = [fast(x) for x in xs], [eager(x) for x in eager_xs]
    return {"off": off([found, xs, model.average], [expected, eager_xs, eager.average])}


@case
def caches_of_steps() -> dict[str, Any]:
    """The output and what caches hold, after each of three steps."""
    found = {}
    for name, (model, given) in caches.models().items():
        for degrees in ({"sp": 2}, {"ring": 2}, {"ulysses": 2}):
            eager, eager_given = copy.deepcopy((model, given))
            fast, fast_given = copy.deepcopy((model, given))
            call = torch.compile(fast, backend=spcompile.backend(inner="eager", **degrees))
            with torch.no_grad():
                for _ in range(3):
                    x = tokens(caches.N).double()
                    state = [call(x, *fast_given), fast_given, list(fast.buffers())]
                    expected = [eager(x, *eager_given), eager_given, list(eager.buffers())]
                    found[f"{name} {degrees}"] = max(off(state, expected), found.get(f"{name} {degrees}", 0.0))
            torch._dynamo.reset()
    return found


@case
def running_statistics() -> dict[str, Any]:
    """Batch norm in train mode, which its running statistics follow."""
    model = Normed().double()
    eager, backend = copy.deepcopy(model), spcompile.backend(inner="aot_eager")
    fast, xs = torch.compile(model, backend=backend), [tokens(7).double() for _ in range(3)]
    with torch.no_grad():
        found, expected = ([call(x) for x in xs] for call in (fast, eager))
    error = off([found, list(model.buffers())], [expected, list(eager.buffers())])
    return {"off": error, "regathers": len(backend.report().regathers)}


@case
def constants_under_inductor() -> dict[str, Any]:
    """Tensors that a model makes while it runs are constants of the graph."""
    model = WithConstants().double()
    with torch.no_grad():
        x = tokens(7).double()
        return {"off": off(compiled(model, inner="inductor")(x), model(x))}


@case
def calls_written_out() -> dict[str, Any]:
    """Calls that are replaced before the capture: Dynamo's graph is a copy then."""
    model = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True).double().eval()
    with torch.no_grad():
        x = tokens(7).double()
        return {"off": off(compiled(model)(x), model(x))}


def _classes(wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Diffusers' classes at odd lengths through AOTAutograd: how far off each is, or why it is refused."""
    found: dict[str, Any] = {}
    for one in (c for cases in zoo.CASES.values() for c in cases if c.label == "odd" and wanted(c.cls)):
        torch._dynamo.reset()
        model = one.build()
        try:
            with torch.no_grad():
                expected, result = model(**one.inputs()), compiled(model, check="off")(**one.inputs())
            found[one.cls] = [off_by_scale(result, expected), one.tolerance]
        except spcompile.SPError as error:
            found[one.cls] = str(error)
    return found


WITH_CONSTANTS = {"HunyuanVideoTransformer3DModel", "ChromaTransformer2DModel", "HunyuanImageTransformer2DModel"}


@case
def classes_with_constants() -> dict[str, Any]:
    return _classes(WITH_CONSTANTS.__contains__)


def _third(number: int) -> dict[str, Any]:
    """Every third of the classes, from one on."""
    names = sorted({c.cls for cases in zoo.CASES.values() for c in cases})
    return _classes(names[number::3].__contains__)


CASES |= {f"classes_{number}_of_3": functools.partial(_third, number) for number in range(3)}


@case
def different_shapes() -> dict[str, Any]:
    """Every rank must be told, and the group must still be usable."""
    model = SelfAttention().double()
    fast = compiled(model)
    try:
        with torch.no_grad():
            fast(tokens(8 + dist.get_rank()).double())
        raised, text = None, ""
    except Exception as error:
        raised, text = [c.__name__ for c in type(error).__mro__], str(error)
    torch._dynamo.reset()
    torch.manual_seed(1)
    x = tokens(8).double()
    with torch.no_grad():
        return {"raised": raised, "text": text, "off": off(compiled(model)(x), model(x))}


@case
def different_dtypes() -> dict[str, Any]:
    model = SelfAttention().to([torch.float32, torch.float64][dist.get_rank() % 2])
    try:
        with torch.no_grad():
            compiled(model)(tokens(8).to(model.qkv.weight.dtype))
        return {"raised": None}
    except spcompile.RankMismatchError as error:
        return {"raised": type(error).__name__, "text": str(error)}


@case
def degrees_that_do_not_match() -> dict[str, Any]:
    try:
        with torch.no_grad():
            compiled(SelfAttention(), sp=dist.get_world_size() + 1)(tokens(8))
        return {"raised": None}
    except Exception as error:
        return {"raised": [c.__name__ for c in type(error).__mro__], "text": str(error)}


@case
def sub_groups() -> dict[str, Any]:
    """Ranks {0, 2} and {1, 3} each share a sequence of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "dp"))
    mine = mesh.get_local_rank("dp")
    model = SelfAttention().double()
    x = [tokens(7), tokens(12)][mine].double() + mine
    backend = spcompile.backend(sp=2, mesh=mesh, inner="aot_eager")
    with torch.no_grad():
        found, expected = torch.compile(model, backend=backend)(x), model(x)
    return {"off": off(found, expected), "degree": backend.report().degree, "data": mine}


@case
def switches() -> dict[str, Any]:
    """Attention within frames and along them in turn, at odd sizes, of which one is large enough to move the cut."""
    from test_switching import Factorised

    model, errors = Factorised(), {}
    backend = spcompile.backend(inner="eager")
    fast = torch.compile(model, backend=backend)
    with torch.no_grad():
        for shape in ((2, 7, 131, 24), (1, 5, 9, 24)):
            x = torch.randn(shape, dtype=torch.float64)
            errors[str(shape)] = off(fast(x), model(x))
    return {"off": max(errors.values()), "exchanges": [e.exchange for e in backend.report().attention]}


# every exchange


class Exchanging(nn.Module):
    """A causal site, one with a mask, one with fewer key/value heads and one that attends to a context."""

    def __init__(self) -> None:
        super().__init__()
        self.causal, self.masked = SelfAttention(is_causal=True), SelfAttention()
        self.q, self.kv = nn.Linear(24, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        num = x.shape[1]
        x = x + self.causal(x)
        x = x + self.masked(x, attn_mask=(torch.arange(num) != num // 2)[None])
        k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.kv(x).chunk(2, dim=-1))
        q = self.q(x).unflatten(-1, (12, -1)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        return attend(x, context, context)


def _exchange(mesh: Sequence[int], inner: str) -> dict[str, Any]:
    """Errors in float64 after each of two resolutions, the second one odd."""
    model = Exchanging().double()
    backend = spcompile.backend(inner=inner, **dict(zip(AXES, mesh, strict=True)))
    fast, errors = torch.compile(model, backend=backend), []
    with torch.no_grad():
        for num in (16, 7):
            inputs = tokens(num).double(), tokens(5).double()
            errors.append(off(fast(*inputs), model(*inputs)))
    return {"off": max(errors), "exchanges": [e.exchange for e in backend.report().attention]}


for _size, _meshes in MESHES_OF.items():
    for _mesh in _meshes:
        for _inner in ("eager", "inductor"):
            CASES[f"exchange_{'x'.join(map(str, _mesh))}_{_inner}"] = lambda m=_mesh, i=_inner: _exchange(m, i)


def _share(mesh: Any, data: int, **options: Any) -> dict[str, Any]:
    """A sequence of ``data``'s own, shared along ``mesh``."""
    model = Exchanging().double()
    inputs = tokens([7, 12][data]).double() + data, tokens(5).double()
    backend = spcompile.backend(mesh=mesh, inner="eager", **options)
    with torch.no_grad():
        found, expected = torch.compile(model, backend=backend)(*inputs), model(*inputs)
    found_exchanges = sorted({e.exchange for e in backend.report().attention})
    return {"off": off(found, expected), "degree": backend.report().degree, "data": data, "exchanges": found_exchanges}


@case
def axes_of_a_mesh_with_data_parallel_groups() -> dict[str, Any]:
    sizes = (2, 2, 1) if dist.get_world_size() == 4 else (2, 2, 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ring", "ulysses"))
    return _share(mesh, mesh.get_local_rank("dp"))


@case
def two_axes_of_a_mesh() -> dict[str, Any]:
    return _share(init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ring", "ulysses")), 0)


@case
def process_groups_of_every_other_rank() -> dict[str, Any]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    return _share(groups[mine], mine, ring=2)


@case
def one_axis_of_a_mesh_of_every_other_rank() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("mine", "other"))
    return _share(mesh["mine"], dist.get_rank() % 2, kv_gather=2)


# diffusers models under Inductor


def _zoo(name: str, dtype: torch.dtype) -> dict[str, Any]:
    which = zoo.case(name, "odd")
    model, inputs = which.build(), which.inputs()
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(**_cast(inputs, torch.float64))[0]
        if dtype != torch.float32:
            model, inputs = model.to(dtype), _cast(inputs, dtype)
        backend = spcompile.backend()
        found = torch.compile(model, backend=backend)(**inputs)[0]
        measured = {"off": off(found, exact), "dtype": str(found.dtype), "regathers": len(backend.report().regathers)}
        measured["rms"] = float((found - exact).pow(2).mean().sqrt())
        if dtype != torch.float32:
            torch._dynamo.reset()
            alone = torch.compile(model)(**inputs)[0]
            measured |= {"off_alone": off(alone, exact), "rms_alone": float((alone - exact).pow(2).mean().sqrt())}
    return measured


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Times and ids stay as they are: their precision is the model's own affair."""
    kept = ("timestep", "guidance", "img_ids", "txt_ids")
    return {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() and k not in kept else v
        for k, v in inputs.items()
    }


for _name in zoo.CORE:
    for _dtype in (torch.float32, torch.bfloat16):
        CASES[f"{_name}_{_dtype}".replace("torch.", "")] = lambda n=_name, d=_dtype: _zoo(n, d)


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=int(os.environ.get("GROUP_TIMEOUT_S", "300"))))
    rank = dist.get_rank()
    for name in names:
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            result = CASES[name]()
        except BaseException:
            result = {"error": traceback.format_exc()}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
