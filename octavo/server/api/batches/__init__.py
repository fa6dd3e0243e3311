"""Files and batches over HTTP, on a local folder."""
