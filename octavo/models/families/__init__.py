"""Families of decoders: what an architecture is, the table of them, and fields of config.json that vary."""
