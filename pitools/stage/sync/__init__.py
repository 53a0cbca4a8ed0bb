"""Keeping datasets on a node by a policy, from cron."""
