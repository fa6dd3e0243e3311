"""The server: an engine in a thread of its own, and what clients see of it over HTTP."""
