"""What the router and its replicas agree on."""

REPORT_PATH = "/octavo/report"
"""Returns a replica's report, but only to requests with the marks header, which clients cannot send."""
CLIENT_HEADER = b"x-octavo-client"
"""Header that tells a replica a client's address. Clients cannot send it."""
