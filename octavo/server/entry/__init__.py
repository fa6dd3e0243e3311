"""Code that every request passes first and last, in a server and in the front of replicas."""
