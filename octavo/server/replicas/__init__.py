"""Several replicas of one server behind one address: `octavo serve --replicas N`.

    parent   fork ── forks another one when one has died ─────────────────
    front        '─ granian ─ choose ─ proxy ──┬─ unix socket ─► replica 0    a whole server
                                                '─ unix socket ─► replica 1    with a model of its own

The parent and the front import neither PyTorch nor a model. See ADR 30.
"""
