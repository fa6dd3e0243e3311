"""POST /v1/decisions: many questions over one input."""
