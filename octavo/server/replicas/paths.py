"""What a router and its replicas agree on."""

REPORT_PATH = "/octavo/report"
"""A replica's report, for requests with the header of marks, which no client can send through the front."""
