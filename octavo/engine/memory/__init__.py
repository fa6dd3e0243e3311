"""How much memory a model takes, and how many KV blocks fit: decided before anything is loaded."""

from octavo.engine.memory.execution_plan import ExecutionPlan, gib
from octavo.engine.memory.plan import plan_execution, plan_weights
from octavo.engine.memory.rank_device import free_memory_bytes, require_devices

__all__ = ["ExecutionPlan", "free_memory_bytes", "gib", "plan_execution", "plan_weights", "require_devices"]
