"""Texts for batch systems: what starts a run and its workers there. Nothing is submitted from here."""
