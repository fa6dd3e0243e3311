"""An engine in a thread of its own, for callers on asyncio event loops."""
