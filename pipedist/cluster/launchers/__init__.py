"""Launchers: what starts and ends worker processes."""
