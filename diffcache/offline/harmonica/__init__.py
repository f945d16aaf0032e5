"""Training of routers that decide which modules a step computes."""
