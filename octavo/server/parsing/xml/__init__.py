"""The tool calls of Qwen3-Coder."""
