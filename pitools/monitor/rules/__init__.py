"""Service level objectives and alerts: rules for Prometheus, and a judgement now."""
