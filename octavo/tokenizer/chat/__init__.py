"""From messages to a prompt that holds each of them, and no control token that a template did not write."""
