"""A client that puts load on any server with OpenAI's API and measures how it answers.

It knows nothing of the engine: a machine that measures needs neither torch nor a GPU.
"""
