"""The object that ``torch.compile(model, backend=...)`` takes."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

from spcompile.agreement import SameInputs, Verified, agree, input_names, or_decline
from spcompile.alarm import alarm_of
from spcompile.config import Config, make_config
from spcompile.cudagraphs import CUDAGraphs, Engine, Replayed
from spcompile.errors import (
    CLOSED,
    ClosedError,
    RecompileLimitWarning,
    SPConfigError,
    UnsupportedGraphError,
    through_dynamo,
)
from spcompile.group import hold, let_go, make_axes, resolve
from spcompile.inner import compile_inner, fingerprint
from spcompile.pieces import Partition
from spcompile.pipeline import distribute, warn_of_unrecognised
from spcompile.report import Report, warn_of_regathers


@dataclass
class _State:
    closed: bool = False

    def require_open(self) -> None:
        if self.closed:
            raise ClosedError("SP113", CLOSED)


class Backend:
    """A torch.compile backend that computes each attention graph on all ranks of a group together."""

    def __init__(self, config: Config, mesh: DeviceMesh | dist.ProcessGroup | None) -> None:
        self.config = config
        self.engine: Engine = CUDAGraphs()
        self._mesh = mesh
        self._report = Report(degree=config.degree)
        if config.cudagraphs != "off":
            self._report.recording_limit = config.max_recordings
        self._axes: list[dist.ProcessGroup] = []
        self._replayed: weakref.WeakSet[Replayed] = weakref.WeakSet()
        self._state = _State()
        weakref.finalize(self, _release, self._replayed)  # CUDA graphs must not outlive what they were made with

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile one Dynamo graph. Called by torch.compile."""
        with through_dynamo():
            if options:
                raise SPConfigError(
                    "SP104",
                    f"torch.compile({', '.join(f'{k}={v!r}' for k, v in options.items())}) is for Inductor alone: say "
                    "spcompile.backend(options=...), which go to the inner compiler, or cudagraphs=",
                )
            self._state.require_open()
            compiled, state = self._compile(module, example_inputs), self._state

        def until_closed(*inputs: Any) -> Any:  # without the backend: Dynamo keeps this, and would keep the mesh
            state.require_open()
            return compiled(*inputs)

        return until_closed

    def close(self) -> None:
        """Release CUDA graphs and their buffers, and the process groups along the mesh's axes that were made here.

        To be called on every rank, before ``destroy_process_group``: NCCL waits for graphs that hold its exchanges.
        Models compiled with this backend can then no longer be called. A second call does nothing.
        """
        if self._state.closed:
            return
        self._state.closed = True
        _release(self._replayed)
        let_go(self._axes)
        self._axes = []

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.config.degree == 1:
            return self._alone(module, example_inputs)
        devices = [x.device.type for x in example_inputs if isinstance(x, Tensor)]
        device_type = "cuda" if "cuda" in devices else "cpu"
        ranks = resolve(self._mesh, self.config, device_type)
        group = ranks.group
        config = replace(self.config, degree=group.size(), mesh=self.config.mesh or ranks.mesh)
        if config.degree == 1:
            return self._alone(module, example_inputs)
        what = f"graph {self._report.graphs}"
        with or_decline(group):
            local = distribute(
                module, example_inputs, config, group.size(), group.group_name, self._report.graphs,
                graphs_on=self.engine.device,
            )  # fmt: skip
            if local is not None:
                _require_values(module, example_inputs, group, local.sends_from)
        if local is None:
            self._report.add(Report(group.size(), untouched=1))
            warn_of_unrecognised(module, config.strict)
            return compile_inner(self.config, module, example_inputs)
        facts = self._facts | local.facts
        agree(group, facts, what, config.timeout, described=local.described)
        if group.rank() == 0:
            warn_of_regathers(local.report)
        new = [axis for axis in make_axes(group, local.meshes) if axis not in self._axes]
        hold(new)
        self._axes += new
        with or_decline(group, compiled=True):
            compiled = local.compiled(partial(self._compiler, local.partition), example_inputs)
        agree(group, {}, what, compiled=True)
        self._report.add(local.report)
        if config.verify == "first" and local.draws:
            warnings.warn("verify='first': a graph that draws random numbers cannot be compared", stacklevel=2)
        elif config.verify == "first":
            compiled = Verified(compiled, module.forward, self._report.verified.append)
        if config.check != "off":
            names = input_names(module)
            read = {i: names[i] for i in local.inputs_read}
            compiled = SameInputs(compiled, group, read, local.draws, always=config.check == "always")
        alarm = alarm_of(group)
        if alarm is not None:
            compiled = alarm.guard(compiled, int(local.digest, 16))
        _warn_before_the_limit()
        return compiled

    def _compiler(
        self, partition: Partition | None, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        if partition is None:
            return compile_inner(self.config, module, example_inputs)
        replayed = Replayed(partition, partial(compile_inner, self.config), self.engine, self._report)
        self._replayed.add(replayed)
        return replayed

    def _alone(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """One rank: the model as it is."""
        if self.config.cudagraphs != "off":
            raise SPConfigError(
                "SP112",
                f"cudagraphs={self.config.cudagraphs!r} captures what several ranks compute together, and there is one "
                "rank: leave it out, or use torch.compile(mode='reduce-overhead')",
            )
        return compile_inner(self.config, module, example_inputs)

    @property
    def _facts(self) -> dict[str, str]:
        """What of the surroundings all ranks must have alike."""
        inner = self.config.inner if isinstance(self.config.inner, str) else "a callable"
        packages = {"spcompile": fingerprint(), "torch": torch.__version__}
        for name in ("flash_attn", "sageattention"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                packages[name] = metadata.version(name)
        c = self.config
        options = f"inner={inner}, options={dict(c.options)}, kernel={c.kernel}, check={c.check}, verify={c.verify}"
        options += f", mesh={c.mesh}, cudagraphs={c.cudagraphs}, max_recordings={c.max_recordings}"
        return {"options": options, "modes": _modes(), "versions": str(packages)}

    def report(self) -> Report:
        """What was done to all graphs compiled so far."""
        return self._report


def _modes() -> str:
    """What of torch's state changes what a graph computes, and is not in it."""
    autocast = [f"{d} {torch.get_autocast_dtype(d)}" for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    return f"autocast={', '.join(autocast) or 'off'}, default dtype={torch.get_default_dtype()}"


def _require_values(
    module: fx.GraphModule, example_inputs: Sequence[Any], group: dist.ProcessGroup, sends_from: set[str]
) -> None:
    """Refuse inputs without values, and exchanges on a device that the group cannot send from."""
    kinds = {device.type for device in group._device_types}
    for name, x in zip(input_names(module), example_inputs, strict=True):
        if not isinstance(x, Tensor):
            continue
        if x.is_meta:
            raise UnsupportedGraphError(
                "SP214",
                f"`{name}` is on the meta device, where tensors have no values. Load it before the first call; "
                "spcompile.testing.plan takes such models",
            )
        if x.device.type in sends_from - kinds:
            raise SPConfigError(
                "SP111",
                f"`{name}` is on {x.device.type}, and the process group ({dist.get_backend(group)}) sends between "
                f"{' and '.join(sorted(kinds))} devices. Move the model and its inputs there, or pass mesh= with a "
                f"group for {x.device.type}",
            )


def _release(replayed: Iterable[Replayed]) -> None:
    for graphs in list(replayed):
        graphs.release()


def _warn_before_the_limit() -> None:
    """Beyond its limit Dynamo runs the model as it is: exact, but on every rank in full."""
    compiling: Any = torch._guards.CompileContext.current_compile_id()
    limit: Any = torch._dynamo.config.recompile_limit
    count = (compiling.frame_compile_id or 0) + 1 if compiling is not None else 0
    if count >= limit:
        warnings.warn(
            f"This is compilation {count} of this code, and "
            f"torch._dynamo.config.recompile_limit is {limit}: further shapes will run unsharded, in full on every "
            "rank. Raise the limit before the first call to go on",
            RecompileLimitWarning,
            stacklevel=2,
        )


def backend(
    sp: int | None = None,
    *,
    ulysses: int | None = None,
    ring: int | None = None,
    kv_gather: int | None = None,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    kernel: str = "auto",
    inner: str | Callable[..., Any] = "inductor",
    options: Mapping[str, Any] | None = None,
    strict: bool = False,
    min_tokens: int = 1,
    dump: str | None = None,
    check: str = "first",
    verify: str = "off",
    timeout: float | None = None,
    cudagraphs: str = "off",
    max_recordings: int = 16,
) -> Backend:
    """Sequence parallelism for an unmodified diffusion transformer, as a torch.compile backend.

    Every rank calls the compiled model with the same full inputs and gets the same full outputs; in between,
    each rank computes its share of the tokens.

    Args:
        sp: number of ranks that share one sequence. None: all ranks of the group. 1: the model is compiled
            unchanged.
        ulysses, ring, kv_gather: the degree of each exchange; those left out are 1, and they multiply to ``sp``.
            Binding for every site that needs an exchange: what they cannot serve is refused. With only ``sp``, each
            site takes the exchange that costs least among those that are exact for it.
        mesh: a `DeviceMesh` with one axis, with one named ``"sp"``, or with axes named ``"ring"``, ``"kv_gather"``,
            ``"ulysses"`` (in this order, any of them; other axes are left alone), or a process group. None: the
            default group, initialised from torchrun's environment if it is not yet (gloo for CPU tensors, NCCL
            for CUDA).
        kernel: ``"auto"`` keeps the attention call as the model made it, and for a ring or causal blocks takes the
            kernel that ``scaled_dot_product_attention`` would have picked; or a name, which is used or refused.
        inner: the torch.compile backend, by name or callable, that compiles the rewritten graph.
        options: handed to ``inner``.
        strict: refuse a graph that needs a regather (an all-gather forced by an op that mixes tokens) or
            leaves an attention site on every rank.
        min_tokens: a site with fewer query tokens stays on every rank.
        check: ``"first"`` compares the inputs of all ranks, weights included, before each graph's first call;
            ``"always"`` before every call; ``"off"`` never. They must be equal.
        verify: ``"first"`` also runs each graph unsharded at its first call, and compares; the report keeps the error.
        timeout: seconds to wait for the other ranks before a graph's first call, once to compare graphs and once until
            all have compiled. None: the group's timeout.
        cudagraphs: ``"piecewise"`` records what lies between exchanges as CUDA graphs; ``"full"`` a whole step as one,
            where every op and the process group can be captured; ``"off"`` neither. A model then has three kinds of
            steps: the first warms up, the second records, all others replay. Outputs are the caller's to keep.
        max_recordings: how often graphs are recorded, for new shapes or parameters that have moved. Beyond it they
            run as they are, with a `RecordingLimitWarning`.
        dump: a folder for the captured graph, layouts, rewritten graph and report of every graph. None: the
            environment variable ``SPCOMPILE_DUMP``, if set.

    Raises:
        SPConfigError: here for options that cannot be right, at the first call for a group that does not fit.
        UnsupportedGraphError: at the first call (compile time) for a graph that cannot be computed exactly.
        RankMismatchError: at the first call if the ranks compiled different graphs or got different inputs.
        VerificationError: at the first call, with ``verify="first"``.
        ClosedError: after `Backend.close`.

    Example::

        # torchrun --nproc-per-node 2 script.py
        compiled = torch.compile(model, backend=spcompile.backend(sp=2))
        with torch.no_grad():
            out = compiled(**inputs)

    Source: DeepSpeed-Ulysses, arXiv:2309.14509, for the exchange; GSPMD, arXiv:2105.04663, for the propagation.
    """
    config = make_config(
        sp,
        ulysses=ulysses,
        ring=ring,
        kv_gather=kv_gather,
        kernel=kernel,
        inner=inner,
        options=options,
        strict=strict,
        min_tokens=min_tokens,
        check=check,
        verify=verify,
        timeout=timeout,
        cudagraphs=cudagraphs,
        max_recordings=max_recordings,
        dump=dump or os.environ.get("SPCOMPILE_DUMP"),
    )
    return Backend(config, mesh)
