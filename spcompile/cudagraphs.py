"""Runs a graph that was cut for CUDA graphs: its pieces from recordings, the gaps between them eagerly.

Step 1 runs every part as it is compiled, with the real exchanges: kernels are chosen and communicators made. Step 2
records each piece and replays it at once. Later steps replay. Every step thus sends the same, so that a rank which
has to record again never leaves the others waiting.

What records is an `Engine`: ``torch.cuda.graph``, or a stand-in on CPUs in `spcompile.testing`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from spcompile.errors import CLOSED, ClosedError, RecordingLimitWarning, SPError, UnsupportedGraphError
from spcompile.pieces import Partition, Value
from spcompile.report import Report

Function = Callable[..., Any]


class Recording(Protocol):
    """A call that can be made again, on the memory it was recorded with."""

    def replay(self) -> None: ...

    def release(self) -> None: ...


class Engine(Protocol):
    """``device``: the kind that it records on. ``capture(run, args)`` records ``run(*args)`` without computing it."""

    device: str

    def capture(self, run: Function, args: Sequence[Tensor]) -> Recording: ...


class CUDAGraphs:
    """``torch.cuda.graph``. All graphs share a pool: what a piece keeps to itself is free again after it."""

    device = "cuda"

    def __init__(self) -> None:
        self.pools: dict[torch.device, tuple[Any, torch.cuda.Stream]] = {}

    def capture(self, run: Function, args: Sequence[Tensor]) -> Recording:
        device = next(x.device for x in args if x.is_cuda)
        with torch.cuda.device(device):
            if device not in self.pools:
                self.pools[device] = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            pool, stream = self.pools[device]
            graph = torch.cuda.CUDAGraph()
            # other threads go on: an exchange that has started, NCCL's watchdog
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run(*args)
        return _CUDARecording(graph, device)


class _CUDARecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        self.graph, self.device = graph, device

    def replay(self) -> None:
        with torch.cuda.device(self.device):
            self.graph.replay()

    def release(self) -> None:
        torch.cuda.synchronize(self.device)  # it may be running
        self.graph.reset()


class Replayed:
    """A partition as a function of the graph's inputs.

    Args:
        compiler: makes a function of a piece's module and its arguments.
        report: counts the recordings, up to its limit; beyond it pieces run as they are compiled.
    Raises (when called):
        UnsupportedGraphError: a piece that the engine cannot record.
        ClosedError: after `release`.
        SPError: a piece's memory is not where it was recorded, which is a defect.
    """

    def __init__(self, partition: Partition, compiler: Function, engine: Engine, report: Report) -> None:
        self.partition, self.compiler, self.engine, self.report = partition, compiler, engine, report
        self.compiled: dict[int, Function] = {}
        self.recordings: dict[int, Recording] = {}
        self.recorded_at: dict[int, list[int]] = {}
        self.buffers: dict[str, Tensor] = {}
        read = {name for part in partition.parts if part.captured for name in part.reads}
        kinds = {name: partition.values[name].kind for name in read}
        self.static = [i for i, n in enumerate(partition.inputs) if kinds.get(n) == "parameter"]
        self.copied = [i for i, n in enumerate(partition.inputs) if kinds.get(n) == "input"]
        self.static_at: list[int] = []
        self.state = self._warm_up
        self.released = False

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self.released:
            raise ClosedError("SP113", CLOSED)
        with torch.no_grad():
            if not self.buffers:
                self.buffers = allocate(self.partition)
            for i in self.copied:
                load(self.buffers[self.partition.inputs[i]], inputs[i])
            if self.recordings and self.static_at != [inputs[i].data_ptr() for i in self.static]:
                self.forget()
            return self.state(inputs)

    def forget(self) -> None:
        """Record again at the next step: parameters lie elsewhere, so that replaying would read what was there."""
        for recording in self.recordings.values():
            recording.release()
        self.recordings = {}
        self.state = self._record

    def release(self) -> None:
        """Let go of graphs and buffers. It cannot be called again."""
        self.forget()
        self.compiled, self.buffers, self.released = {}, {}, True

    # steps

    def _warm_up(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        outputs = self._run(inputs, self._call)
        self.state = self._record
        return outputs

    def _record(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        if self.report.recordings >= (self.report.recording_limit or 0):
            warnings.warn(
                f"CUDA graphs were recorded {self.report.recordings} times, which is the limit: this graph runs "
                "without them from now on. Raise max_recordings, or pass fewer shapes and leave parameters in place",
                RecordingLimitWarning,
                stacklevel=2,
            )
            self.state = self._eagerly
            return self._eagerly(inputs)
        self.static_at = [inputs[i].data_ptr() for i in self.static]
        try:
            outputs = self._run(inputs, self._capture)
        except BaseException:
            self.forget()
            raise
        self.report.recordings += 1
        self.state = self._replay_first
        return outputs

    def _eagerly(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return self._run(inputs, self._call)

    def _replay_first(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        outputs = self._run(inputs, self._checked)
        self.state = self._replay
        return outputs

    def _replay(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return self._run(inputs, lambda i, args: self.recordings[i].replay())

    def _run(self, inputs: Sequence[Any], run_piece: Callable[[int, Callable[[], list[Any]]], None]) -> tuple[Any, ...]:
        """One step: ``run_piece(number, its arguments)`` for each piece, gaps as they are."""
        given = dict(zip(self.partition.inputs, inputs, strict=True))
        passed: dict[str, Any] = {}

        def arguments(i: int) -> list[Any]:
            part = self.partition.parts[i]
            reads = [self._find(name, given, passed, part.captured) for name in part.reads]
            return reads + [self.buffers[name] for name in part.writes]

        for i, part in enumerate(self.partition.parts):
            if part.captured:
                run_piece(i, lambda i=i: arguments(i))  # type: ignore[misc]
            else:
                passed.update(zip(part.returns, part.module.forward(*arguments(i)), strict=True))
        end = self.partition.end
        return end.module.forward(*(self._own(n, given, passed) for n in end.reads))

    def _find(self, name: str, given: Mapping[str, Any], passed: Mapping[str, Any], captured: bool) -> Any:
        """A value where the part reads it: gaps read the step's own inputs, pieces their copies."""
        value = self.partition.values[name]
        if value.kind == "parameter" or (value.kind == "input" and not captured):
            return given[name]
        return passed[name] if value.slot is None else self.buffers[name]

    def _own(self, name: str, given: Mapping[str, Any], passed: Mapping[str, Any]) -> Any:
        """A value for the caller to keep: the next step writes into the buffers."""
        found = self._find(name, given, passed, captured=False)
        return found.clone() if name in self.buffers and found is self.buffers[name] else found

    # pieces

    def _call(self, i: int, arguments: Callable[[], list[Any]]) -> None:
        args = arguments()
        if i not in self.compiled:
            self.compiled[i] = self.compiler(_bare(self.partition.parts[i].module), args)
        returned = self.compiled[i](*args)
        if any(isinstance(x, Tensor) for x in pytree.tree_leaves(returned)):
            raise SPError(
                "SP213",
                f"piece {i} returned new memory, which a replay would not fill. This is a defect of spcompile; please "
                "report it",
            )

    def _capture(self, i: int, arguments: Callable[[], list[Any]]) -> None:
        args = arguments()
        try:
            self.recordings[i] = self.engine.capture(lambda *args: self._call(i, lambda: list(args)), args)
        except Exception as error:
            calls = ", ".join(self.partition.entries()[i].holds)
            raise UnsupportedGraphError(
                "SP215",
                f"piece {i} ({calls}) cannot be captured as a CUDA graph: {type(error).__name__}: {error}. "
                "Leave cudagraphs out",
            ) from error
        self.recorded_at[i] = [x.data_ptr() for x in args]
        self.recordings[i].replay()

    def _checked(self, i: int, arguments: Callable[[], list[Any]]) -> None:
        part = self.partition.parts[i]
        names = [*part.reads, *part.writes]
        moved = [n for n, x, at in zip(names, arguments(), self.recorded_at[i], strict=True) if x.data_ptr() != at]
        if moved:
            raise SPError(
                "SP213",
                f"piece {i} was recorded with {', '.join(moved)} elsewhere in memory: a replay would read what lies "
                "there now. This is a defect of spcompile; please report it",
            )
        self.recordings[i].replay()


def _bare(module: fx.GraphModule) -> fx.GraphModule:
    """Without the fake tensors of planning, which are none of the inner compiler's."""
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    return module


def allocate(partition: Partition) -> dict[str, Tensor]:
    """Every value that lies in a buffer, by name."""
    held = [v for v in partition.values.values() if v.slot is not None]
    devices = {v.slot: v.device for v in held}
    with torch.inference_mode(False):  # steps in and out of inference mode write there
        memory = {
            slot: torch.empty(partition.slots[slot], dtype=torch.uint8, device=device)  # type: ignore[index]
            for slot, device in devices.items()
        }
        return {v.name: _at(v, memory[v.slot]) for v in held}


def _at(value: Value, memory: Tensor) -> Tensor:
    """A tensor of its own, and no view of ``memory``: compilers look through views."""
    tensor = torch.empty(0, dtype=value.dtype, device=memory.device)
    return tensor.set_(memory.untyped_storage(), 0, value.shape, value.stride)


def load(buffer: Tensor, x: Tensor) -> None:
    """Copy an input; entries that share a place are written once."""
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.shape[dim] > 1:
            buffer, x = buffer.narrow(dim, 0, 1), x.narrow(dim, 0, 1)
    buffer.copy_(x)
