"""What people type who come from another server, and Octavo's answer."""
