"""The tests. They are a package so that noxfile.py and the benchmarks can import tests.harness."""
