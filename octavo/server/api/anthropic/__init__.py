"""Anthropic's API: POST /v1/messages, as a chat."""
