"""Tensor parallelism as processes: rank 0 is the engine's own, each other rank follows it step by step."""

from octavo.engine.ranks.leader import LeaderRunner, start_ranks

__all__ = ["LeaderRunner", "start_ranks"]
