"""A program that checks a train.py from outside: python -m verify FOLDER; see README.md."""
