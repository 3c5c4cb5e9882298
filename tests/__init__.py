"""The tests: docs/maintaining.md says how they are chosen."""
