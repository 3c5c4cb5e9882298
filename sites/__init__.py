"""Known clusters as data: what their pages say about jobs, and the lines that follow from it.

`python -m sites --help` says what can be done with them.
"""
