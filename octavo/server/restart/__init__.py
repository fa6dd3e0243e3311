"""Starts the server again in a new process when its engine dies."""
