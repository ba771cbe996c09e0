"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("pipedist", deadline=None)  # how long an example takes says nothing here
settings.load_profile("pipedist")
