"""Clusters whose workers an engine places."""
