"""What a router and its replicas agree on."""

REPORT_PATH = "/octavo/report"
"""A replica's report. Never on a public address: replicas listen on unix sockets of their user alone."""
