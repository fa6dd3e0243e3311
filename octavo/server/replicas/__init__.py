"""Several replicas behind one address: `octavo serve --replicas N`.

    parent   fork ── restarts a replica that died ────────────────────────
    front        '─ granian ─ choose ─ proxy ──┬─ unix socket ─► replica 0    a complete server
                                                '─ unix socket ─► replica 1    with its own model

The parent and the front never import PyTorch or load a model. See ADR 30.
"""
