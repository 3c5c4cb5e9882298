"""The tests that submit jobs, in the SLURM that lab/ starts on this machine."""
