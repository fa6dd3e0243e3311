"""`octavo bench` and its commands."""
