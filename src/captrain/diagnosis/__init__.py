"""What an agent's own logs say that it lacks: no model, no network, no torch."""
