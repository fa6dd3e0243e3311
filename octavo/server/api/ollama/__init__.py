"""Ollama's API, translated to chats and prompts."""
