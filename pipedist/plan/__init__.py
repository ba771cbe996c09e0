"""Spec + what is there -> Plan: phases of passes, checked, printable, before anything runs."""

from pipedist.plan.compiler import compile_plan
from pipedist.plan.model import NOTHING_SAID, PassPlan, Plan

__all__ = ["NOTHING_SAID", "PassPlan", "Plan", "compile_plan"]
