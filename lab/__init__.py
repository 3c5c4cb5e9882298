"""A throwaway SLURM of several nodes on one machine: `python -m lab`, or `with Lab(Wanted(nodes=2)) as lab:`."""

from lab import faults
from lab.base import LabError
from lab.cluster import Lab, why_not
from lab.config import Wanted

__all__ = ["Lab", "LabError", "Wanted", "faults", "why_not"]
