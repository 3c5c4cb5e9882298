"""The benchmarks: `python -m benchmarks.measure --help`, from the folder above this one."""
