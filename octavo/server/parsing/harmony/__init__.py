"""Harmony: the format of gpt-oss."""
