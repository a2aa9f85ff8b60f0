"""What every process needs: settings, logs, metrics, server assembly."""
