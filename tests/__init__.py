"""The tests, a package so that noxfile.py and the benchmarks can import tests.harness. It imports nothing itself."""
