"""How much memory a model takes, and how many KV blocks fit: decided before anything is loaded."""

from octavo.engine.memory.plan import ExecutionPlan, free_memory_bytes, gib, plan_execution

__all__ = ["ExecutionPlan", "free_memory_bytes", "gib", "plan_execution"]
