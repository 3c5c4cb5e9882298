"""A throwaway SLURM of several nodes on one Linux machine: `python -m lab`, or `with Lab() as lab:`."""

from lab.base import LabError
from lab.cluster import Lab, why_not

__all__ = ["Lab", "LabError", "why_not"]
