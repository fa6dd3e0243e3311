"""What every request passes first, in a server and in the front of replicas."""
