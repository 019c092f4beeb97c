"""The bus: connection, subjects, messages, codec, transfers, the embedded nats-server."""
