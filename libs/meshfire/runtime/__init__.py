"""The life of a service process: settings, telemetry, server, health, discovery, drain. Knows no service."""
