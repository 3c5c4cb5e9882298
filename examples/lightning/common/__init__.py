"""Models and data sets that every example shares; edit the top-level common/, then run `nox -s sync -- --fix`."""
