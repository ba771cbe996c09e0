"""Spec + what is there -> Plan: phases of passes, checked, printable, before anything runs."""

from pipedist.plan.compiler import compile_plan
from pipedist.plan.model import DEFAULT_COLLECTIVES, PassPlan, Plan

__all__ = ["DEFAULT_COLLECTIVES", "PassPlan", "Plan", "compile_plan"]
