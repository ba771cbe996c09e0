"""pipedist."""
