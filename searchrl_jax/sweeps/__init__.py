"""Sweeps: arms x seeds, run in processes of their own, and their figures."""
