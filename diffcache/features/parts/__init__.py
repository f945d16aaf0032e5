"""Parts that methods are put together from: schedules, stand-ins, numerics."""
