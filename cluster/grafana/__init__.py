"""A Grafana dashboard and alerts for Prometheus, as files that `isobatch dashboards` makes of tables."""
