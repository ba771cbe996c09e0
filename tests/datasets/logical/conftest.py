"""Hypothesis without deadlines: the time of an example says nothing on a machine that others use too."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
