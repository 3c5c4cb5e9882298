"""What the tests, noxfile.py and the benchmarks share: start an example, follow it, and read what it leaves.

launchers   how each example is copied and started: one row for each
processes   the processes of a run, found by their environment
reference   an example's reference run, made before what the tests need is installed
runs        an example's local run: start it, wait for it, kill it, resume it
edits       changes to an example's copy, such as a planted exception
outputs     metrics.csv and the model, read, computed again and compared
refusals    how bad input has to end
samples     image files in MNIST's format, and the batches that a process has to see
readme      the commands of a README
jobs        an example's run.slurm in the lab
notebooks   a job of jupyter/run.slurm in the lab
browser     JupyterLab as a user sees it
sessions    what the sessions of noxfile.py are made of, and what they decide by the machine
copies      what stands in several example folders, and is held to be the same

launchers, processes, sessions and copies import nothing but the standard library: nox's own environment has nothing
else. None of them imports tests or benchmarks: both are built on this package.
"""
