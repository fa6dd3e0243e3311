"""Requests, scheduling, the step loop and sampling.

Import from the submodules: `request` and `scheduler` need no torch, so nothing is imported here.
"""
