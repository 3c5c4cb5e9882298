"""What belongs to no example: the repository itself, lab/, preflight/, benchmarks/ and studies/."""
