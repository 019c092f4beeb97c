"""Who may do what on the bus: NATS configurations, credentials and certificates for a shared fleet."""
