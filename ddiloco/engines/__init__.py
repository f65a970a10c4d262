"""Engines: they place roles, start them and restart them."""
