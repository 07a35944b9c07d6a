"""Published methods for search agents, one file each; see core.py."""
