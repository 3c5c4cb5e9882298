"""What the tests, noxfile.py and the benchmarks share: start an example, follow it, and read what it leaves.

launchers   how each example is copied and started: one row for each
processes   the processes of a run: find them, end them, wait for them
runs        an example's local run: start it, wait for it, kill it
edits       changes to an example's copy, such as one that makes a run wait
outputs     metrics.csv and the model: read, computed again and compared
readme      the commands of a page
jobs        an example's run.slurm in the lab
sessions    what the sessions of noxfile.py tell pytest
copies      what is the same in several example folders

noxfile.py imports launchers, sessions and copies. They import the standard library alone: nox's environment has nothing
else. Nothing here imports tests or benchmarks.
"""
