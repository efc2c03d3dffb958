"""For tests, the user's as much as ours: any number of ranks in one process, and plans for devices not at hand."""

from spcompile.testing.recording import OnCPU, record_on_cpu
from spcompile.testing.simulate import Plan, Simulation, plan, simulate

__all__ = ["OnCPU", "Plan", "Simulation", "plan", "record_on_cpu", "simulate"]
