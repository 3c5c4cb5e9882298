"""The studies that docs/, the examples' READMEs and benchmarks/RESULTS.md cite: `python -m studies.NAME --help`.

A study whose tables are measured is not kept beside them. Commit db8f58d has every one, with all that it needs, and
d89bcc2 has step_model_check:

    git worktree add ../measured db8f58d && cd ../measured && python -m studies.NAME --help
"""
