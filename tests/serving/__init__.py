"""Serving: batches, limits, routes, load, and the page in a browser."""
