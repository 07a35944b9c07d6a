"""The quickstart: its stages (run.py) and the figures of a run."""
