"""A throwaway SLURM of several nodes on one Linux machine: `python -m lab`, or `with Lab() as lab:`."""

from lab.cluster import Lab, why_not
from lab.config import LabError

__all__ = ["Lab", "LabError", "why_not"]
