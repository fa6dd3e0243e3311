"""Long bodies are read in child processes, so that nobody waits for the interpreter meanwhile."""
