"""What will be allocated, where, before anything is."""

from infinity.plan.memory import Plan, PlanLine, plan_memory
from infinity.plan.placement import Placement

__all__ = ["Placement", "Plan", "PlanLine", "plan_memory"]
