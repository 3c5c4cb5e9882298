"""The tests. They are a package, so that the two files named conftest.py are two modules."""
