"""All ranks of a group in one process: the same rewritten graph, run node by node for every rank in lockstep.

PyTorch's own ways were tried first. Its threaded process group replaces the global process group while it is
installed and gives every rank the one random generator of the process; `LocalTensorMode` runs an opaque custom
op once per rank, so that a collective inside one finds no peers. Exchanges here are generators (see
`spcompile.ops.wire`), so lockstep needs neither, and runs the very code of the real ops.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from spcompile import ops
from spcompile.config import Config, make_config
from spcompile.cudagraphs import Recording, allocate, load
from spcompile.errors import SPConfigError, through_dynamo
from spcompile.infer import is_random
from spcompile.pieces import Partition
from spcompile.pipeline import distribute, warn_of_unrecognised
from spcompile.report import Report, warn_of_regathers
from spcompile.testing.recording import OnCPU

aten = torch.ops.aten


@dataclass(frozen=True)
class Simulation:
    """``outputs[r]`` is what rank r returned; ``report`` is what `spcompile.Backend.report` would say."""

    outputs: list[Any]
    report: Report


def simulate(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    sp: int | None = None,
    **backend_options: Any,
) -> Simulation:
    """Run ``model(*args, **kwargs)`` as ``sp`` ranks would, in this process, without a launcher.

    Args:
        model: a module or function, as for ``torch.compile``. A module's attributes, parameters and buffers are
            left as found.
        args, kwargs: the full inputs, which every rank gets. Tensors among them are left as found.
        sp, backend_options: as for `spcompile.backend`; ``inner`` is always ``"eager"``. With
            ``cudagraphs="piecewise"`` pieces are recorded and replayed, by `OnCPU`.

    Returns:
        A `Simulation`: one output per rank, and the report.

    Raises:
        SPError: what `spcompile.backend` would raise.

    Example::

        run = spcompile.testing.simulate(model, kwargs=inputs, sp=4)
        for out in run.outputs:
            torch.testing.assert_close(out, model(**inputs))
    """
    config = _config(sp, backend_options)
    assert config.degree is not None
    backend = _Backend(config, config.degree)
    kwargs = dict(kwargs or {})
    outputs = []
    with torch.no_grad(), torch._dynamo.config.patch(_NO_LIMITS):
        compiled = torch.compile(model, backend=backend)
        for backend.rank in range(config.degree):
            with _left_as_found([model, args, kwargs]):
                outputs.append(pytree.tree_map(_copied, compiled(*args, **kwargs)))
    return Simulation(outputs, backend.report)


@dataclass(frozen=True)
class Plan:
    """The rewritten graphs that every rank would run, and the report.

    ``partitions`` are how ``cudagraphs=`` cuts them.
    """

    graphs: list[fx.GraphModule]
    report: Report
    partitions: list[Partition] = field(default_factory=list)


def plan(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    sp: int | None = None,
    device: str | None = None,
    **backend_options: Any,
) -> Plan:
    """Plan a run without running it, also for a device that is not there and for models that do not fit in memory.

    Args:
        model, args, kwargs: as for `simulate`; parameters and tensors may be on the ``meta`` device.
        sp, backend_options: as for `spcompile.backend`.
        device: plan as if everything were on it, ``"cuda"`` for example.

    Raises:
        SPError: what `spcompile.backend` would raise there.

    Example::

        with torch.device("meta"):
            model = FluxTransformer2DModel()
        print(spcompile.testing.plan(model, kwargs=inputs, sp=8, device="cuda").report)
    """
    config = _config(sp, backend_options)
    assert config.degree is not None
    planned = Plan([], Report(degree=config.degree))

    def compiler(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        assert config.degree is not None
        with through_dynamo():
            index = planned.report.graphs
            local = distribute(module, example_inputs, config, config.degree, "planned", index, device)
        if local is None:
            planned.report.add(Report(config.degree, untouched=1))
        else:
            planned.graphs.append(local.module)
            planned.partitions.extend(filter(None, [local.partition]))
            planned.report.add(local.report)
        return module.forward

    with torch.no_grad(), torch._dynamo.config.patch(_NO_LIMITS):
        torch.compile(model, backend=compiler)(*args, **dict(kwargs or {}))
    if not planned.report.graphs and not planned.report.untouched:
        raise SPConfigError("SP110", "torch.compile compiled nothing here; call plan outside of dispatch modes")
    return planned


_NO_LIMITS = {"recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20}
"""Past its limit Dynamo would run the model as it is."""


def _config(sp: int | None, options: dict[str, Any]) -> Config:
    """The configuration of a backend that has no process group and runs eagerly."""
    if options.pop("inner", "eager") != "eager":
        raise SPConfigError("SP110", "a simulation runs the rewritten graph eagerly; leave inner= out")
    if options.pop("mesh", None) is not None:
        raise SPConfigError("SP110", "a simulation needs no process group; leave mesh= out")
    defaults = {"ulysses": None, "ring": None, "kv_gather": None, "kernel": "auto", "options": None,
                "strict": False, "min_tokens": 1, "dump": None,
                "check": "first", "verify": "off", "timeout": None, "cudagraphs": "off",
                "max_recordings": 16}  # fmt: skip
    config = make_config(sp, inner="eager", **(defaults | options))
    if config.degree is None:
        raise SPConfigError("SP110", "a simulation needs a number of ranks: sp=2, for example")
    return config


class _Backend:
    """Compiles each graph for all ranks and returns the results of the rank of the moment."""

    def __init__(self, config: Config, degree: int) -> None:
        self.config, self.degree, self.rank = config, degree, 0
        self.report = Report(degree=degree)

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        local = None
        if self.degree > 1:
            with through_dynamo():
                local = distribute(
                    module, example_inputs, self.config, self.degree, "simulated", self.report.graphs,
                    graphs_on=OnCPU.device,
                )  # fmt: skip
        if local is None:
            self.report.add(Report(self.degree, untouched=1))
            if self.degree > 1:
                with through_dynamo():
                    warn_of_unrecognised(module, self.config.strict)
            return module.forward
        self.report.add(local.report)
        warn_of_regathers(local.report)
        if (partition := local.partition) is not None:
            return local.compiled(lambda module, _: _LockstepParts(module, self, partition), example_inputs)
        return local.compiled(lambda module, _: _Lockstep(module, self), example_inputs)


class _Lockstep:
    """Runs a rewritten graph for all ranks. Calls with the inputs of the last one return its results."""

    def __init__(self, module: fx.GraphModule, backend: _Backend) -> None:
        self.module, self.backend, self.degree = module, backend, backend.degree
        self.writes = any(n.target is aten.copy_.default for n in module.graph.nodes)
        self.last: tuple[list[Any], list[tuple[Any, ...]]] | None = None

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        rank = self.backend.rank
        key = [(id(x), x._version if isinstance(x, Tensor) and not x.is_inference() else 0) for x in inputs]
        if self.last is None or self.last[0] != key or self.writes:
            self.last = key, self.run(rank, inputs)
            self.held = inputs  # so that no id is used again
        return self.last[1][rank]

    def run(self, rank: int, inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
        return self.interpret(self.module, [[x] * self.degree for x in inputs], rank)

    def interpret(self, module: fx.GraphModule, inputs: Sequence[list[Any]], rank: int) -> list[tuple[Any, ...]]:
        """Run ``module`` node by node; an input is what it is on each rank."""
        env: dict[fx.Node, list[Any]] = {}
        given = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "get_attr":
                env[node] = [_attribute(module, node.target)] * self.degree
            elif node.op == "output":
                return [_of_rank(node.args[0], env, r) for r in range(self.degree)]
            else:
                env[node] = self.call(node, env, rank)
        raise AssertionError("a graph without output")

    def call(self, node: fx.Node, env: dict[fx.Node, list[Any]], rank: int) -> list[Any]:
        target: Any = node.target
        per_rank = [_of_rank((node.args, node.kwargs), env, r) for r in range(self.degree)]
        program = ops.PROGRAMS.get(target)
        if program is not None:
            mesh: Any = node.args[-2]
            with torch.no_grad():
                return ops.wire.in_lockstep([program(r, *args[:-1]) for r, (args, _) in enumerate(per_rank)], mesh)
        program = ops.PROGRAMS_INTO.get(target)
        if program is not None:
            names = [a.name for a in target._schema.arguments]
            at, mesh = names.index("group"), node.args[names.index("mesh")]
            with torch.no_grad():
                programs = [program(r, *args[:at], *args[at + 1 :]) for r, (args, _) in enumerate(per_rank)]
                return ops.wire.in_lockstep(programs, mesh)
        if target is aten.copy_.default and _is_shared(env[node.args[0]]):  # type: ignore[index]
            args, _ = per_rank[rank]
            return [target(*args)] * self.degree
        if all(env[n][r] is env[n][0] for n in node.all_input_nodes for r in range(self.degree)):
            args, kwargs = per_rank[0]  # the same call on every rank, random draws included
            return [target(*args, **kwargs)] * self.degree
        if is_random(node):
            return [self.drawn(target, args, kwargs, torch.get_rng_state(), last=r == self.degree - 1)
                    for r, (args, kwargs) in enumerate(per_rank)]  # fmt: skip
        return [target(*args, **kwargs) for args, kwargs in per_rank]

    def drawn(self, target: Any, args: Any, kwargs: Any, state: Tensor, last: bool) -> Any:
        """One rank's draw. Each has a generator of its own, and all are in the same state."""
        result = target(*args, **kwargs)
        if not last:
            torch.set_rng_state(state)
        return result


class _LockstepParts(_Lockstep):
    """Runs the parts of a graph that is cut for CUDA graphs, pieces from recordings.

    A run is two steps, one recorded and one replayed, which gives the results; before each, buffers are filled with
    NaN. It is one, recorded, for a graph that writes into its inputs.
    """

    def __init__(self, module: fx.GraphModule, backend: _Backend, partition: Partition) -> None:
        super().__init__(module, backend)
        self.partition, self.engine = partition, OnCPU()

    def run(self, rank: int, inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
        buffers = [allocate(self.partition) for _ in range(self.degree)]
        recordings: dict[int, Recording] = {}
        results: list[tuple[Any, ...]] = []
        for _ in range(1 if self.writes else 2):
            results = self.step(rank, dict(zip(self.partition.inputs, inputs, strict=True)), buffers, recordings)
        return results

    def step(
        self,
        rank: int,
        given: Mapping[str, Any],
        buffers: list[dict[str, Tensor]],
        recordings: dict[int, Recording],
    ) -> list[tuple[Any, ...]]:
        """Record the pieces, or replay those that are."""
        for held in buffers:
            for name, buffer in held.items():
                if self.partition.lifetimes[name][0] >= 0:
                    torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage()).fill_(255)
            for name, buffer in held.items():
                if self.partition.values[name].kind == "input":
                    load(buffer, given[name])
        passed: dict[str, list[Any]] = {}

        def on_ranks(name: str, captured: bool) -> list[Any]:
            value = self.partition.values[name]
            if value.kind == "parameter" or (value.kind == "input" and not captured):
                return [given[name]] * self.degree
            return passed[name] if value.slot is None else [held[name] for held in buffers]

        for i, part in enumerate(self.partition.parts):
            args = [on_ranks(n, part.captured) for n in part.reads] + [[b[n] for b in buffers] for n in part.writes]
            if part.captured:
                if i not in recordings:
                    flat = [x for ranks in args for x in ranks]
                    recordings[i] = self.engine.capture(partial(self.piece, part.module, rank), flat)
                recordings[i].replay()
            else:
                returned = self.interpret(part.module, args, rank)
                passed.update({n: [x[j] for x in returned] for j, n in enumerate(part.returns)})
        end = self.partition.end
        read = [on_ranks(n, captured=False) for n in end.reads]
        for name, values in zip(end.reads, read, strict=True):
            if name in buffers[0] and name not in given:
                values[:] = [x.clone() for x in values]
        return self.interpret(end.module, read, rank)

    def piece(self, module: fx.GraphModule, rank: int, *flat: Any) -> None:
        """A piece on all ranks; ``flat`` has its arguments, each for one rank after the other."""
        self.interpret(module, [list(flat[i : i + self.degree]) for i in range(0, len(flat), self.degree)], rank)


def _is_shared(values: Sequence[Any]) -> bool:
    """Is it one object on all ranks?"""
    return all(value is values[0] for value in values)


def _of_rank(arguments: Any, env: Mapping[fx.Node, list[Any]], rank: int) -> Any:
    """Arguments with every node replaced by what it is on one rank."""
    return fx.map_arg(arguments, lambda n: env[n][rank])


def _attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _left_as_found(values: Sequence[Any]) -> Iterator[None]:
    """Modules keep their attributes, and tensors among ``values`` their shape and contents."""
    leaves = pytree.tree_leaves(values)
    modules = [m for value in leaves if isinstance(value, torch.nn.Module) for m in value.modules()]
    attributes = [(m, {name: (v, _contents(v)) for name, v in vars(m).items()}) for m in modules]
    tensors = [t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    tensors += [v for v in leaves if isinstance(v, Tensor)]
    before = [(t, t._version, t.clone(), t.shape, t.stride()) for t in tensors if not t.is_inference()]
    yield
    for module, found in attributes:
        vars(module).clear()
        vars(module).update({name: value for name, (value, _) in found.items()})
        for value, contents in found.values():
            if contents is not None:  # in place: modules may share it
                value.clear()
                value.extend(contents) if isinstance(value, list) else value.update(contents)
    for tensor, version, saved, shape, stride in before:
        if tensor.shape != shape or tensor.stride() != stride:
            tensor.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, stride)
        if tensor._version != version:
            tensor.copy_(saved)


def _contents(value: Any) -> Any:
    """A copy of what a plain container holds, None for anything else."""
    return copy.copy(value) if type(value) in (dict, list, set) else None
