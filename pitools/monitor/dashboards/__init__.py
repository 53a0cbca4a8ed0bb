"""Dashboards for Grafana, generated from a table of panels."""
