"""What the fleet does with its hours: usage, metrics, alerts, dashboards, reports and a live view."""
