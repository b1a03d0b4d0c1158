"""What will be allocated, where, before anything is."""

from infinity.plan.bill import Plan, PlanLine
from infinity.plan.memory import plan_memory
from infinity.plan.placement import Placement

__all__ = ["Placement", "Plan", "PlanLine", "plan_memory"]
